"""What Redis keeps of a worker's prefix cache: each entry counts once, for as long as the lease."""

import json

from block_reader import BlockReader
from penstock.schemas.queue.kv_events import BlockBatch, CachedBlock
from penstock.schemas.queue.worker_queue import WorkerQueue
from plain import plain
from scripted import MODEL, on_a_lane

BEGIN = BlockBatch(True, [], {"a": CachedBlock(None, [1, 2]), "b": CachedBlock("a", [3, 4])})
NEXT = BlockBatch(False, ["b"], {"c": CachedBlock("a", [5, 6])})
KEYS = [BlockReader(None, MODEL, "w").key + name for name in ("events", "blocks")]


async def tell(queue: WorkerQueue, seq: int, batch: BlockBatch, most: int = 100) -> str:
    return await queue.tell_blocks("w", seq, batch, 2, most)


async def entries(queue: WorkerQueue) -> dict[bytes, list[object]]:
    found = await plain(queue.connection.redis).xrange(KEYS[0])
    return {name: json.loads(fields[b"events"]) for name, fields in found}


@on_a_lane
async def test_an_entry_that_is_told_again_counts_once(queue: WorkerQueue) -> None:
    for seq, batch in ((7, BEGIN), (7, BEGIN), (8, NEXT), (8, NEXT)):
        assert await tell(queue, seq, batch) == "ok"
    stored = {"type": "BlockStored", "block_size": 2}
    assert await entries(queue) == {
        b"7-0": [
            {"type": "AllBlocksCleared"},
            stored
            | {"block_hashes": ["a", "b"], "parent_block_hash": None, "token_ids": [1, 2, 3, 4]},
        ],
        b"8-0": [
            {"type": "BlockRemoved", "block_hashes": ["b"]},
            stored | {"block_hashes": ["c"], "parent_block_hash": "a", "token_ids": [5, 6]},
        ],
    }
    state = await plain(queue.connection.redis).hgetall(KEYS[1])
    assert state.pop(b"seq") == b"8"
    assert {name: json.loads(text) for name, text in state.items()} == {
        b"a": {"parent_block_hash": None, "token_ids": [1, 2]},
        b"c": {"parent_block_hash": "a", "token_ids": [5, 6]},
    }


@on_a_lane
async def test_what_does_not_follow_is_behind_until_all_is_told_anew(queue: WorkerQueue) -> None:
    assert await tell(queue, 1, BEGIN) == "ok"
    assert await tell(queue, 3, NEXT) == "behind"
    assert await tell(queue, 3, BlockBatch()) == "behind"
    assert await tell(queue, 1, BlockBatch()) == "ok"
    assert list(await entries(queue)) == [b"1-0"]
    assert await tell(queue, 4, BlockBatch(True)) == "ok"
    assert await plain(queue.connection.redis).hgetall(KEYS[1]) == {b"seq": b"4"}


@on_a_lane
async def test_the_stream_keeps_as_many_entries_as_it_is_told(queue: WorkerQueue) -> None:
    for seq in range(1, 9):
        assert await tell(queue, seq, BlockBatch(True), most=3) == "ok"
    assert list(await entries(queue)) == [b"6-0", b"7-0", b"8-0"]


@on_a_lane
async def test_without_a_lease_nothing_is_kept_or_written(queue: WorkerQueue) -> None:
    client = plain(queue.connection.redis)
    assert await tell(queue, 1, BEGIN) == "ok"
    lease_end = int(await client.zscore(f"{queue.lane.prefix}workers", "w"))
    assert [await client.execute_command("PTTL", key) > 0 for key in KEYS] == [True, True]
    seconds, micros = await client.time()
    left_ms = lease_end - seconds * 1000 - micros // 1000
    assert all([await client.pttl(key) <= left_ms + 1 for key in KEYS])
    await queue.unregister("w")
    assert await client.exists(*KEYS) == 0
    for batch in (NEXT, BEGIN, BlockBatch()):
        assert await tell(queue, 2, batch) == "lost"
    assert await client.exists(*KEYS) == 0

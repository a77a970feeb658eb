"""The checksum of a stream: whatever does not continue what a reader has is an error, not text."""

import asyncio
import struct
import zlib
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.gateway.queue_client import QueueClient
from penstock.schemas.cursor import Cursor
from penstock.schemas.delivery import Commit, Started
from penstock.schemas.errors import StreamDiverged
from penstock.schemas.event import EVENT, Delta, Done, Event, Failed, Usage
from penstock.schemas.model import WorkerCard
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.result import fold
from penstock.schemas.wire.checksum import EMPTY, roll
from penstock.worker.engine.io.messages import Output
from penstock.worker.jobs.active_job import ActiveJob
from penstock.worker.text.byte_tokenizer import ByteTokenizer
from penstock.worker.text.completion import Completion
from penstock.worker.text.model_tokenizer import ModelTokenizer
from plain import plain
from scripted import LANE, a_job, continued, deltas, done, finish, queue_at, started

TEXT = ModelTokenizer(ByteTokenizer())


def taken(events: list[Event], at: int = 0) -> list[Event]:
    cursor = Cursor("job", at)
    return [rest for event in events if (rest := cursor.take(event)) is not None]


@given(st.lists(st.tuples(st.integers(0, 900), st.lists(st.integers(0, 2**22 - 1), min_size=1))))
def test_the_checksum_is_a_crc_of_words_however_the_tokens_are_cut(
    cuts: list[tuple[int, list[int]]],
) -> None:
    words, rolled, token_by_token = b"", EMPTY, EMPTY
    for index, token_ids in cuts:
        rolled = roll(rolled, index, token_ids)
        for token_id in token_ids:
            token_by_token = roll(token_by_token, index, [token_id])
            words += struct.pack("<I", token_id | index << 22)
    assert rolled == token_by_token == zlib.crc32(words)


def a_log() -> list[Event]:
    """Three choices in turn."""
    made: list[Delta] = []
    for number in range(9):
        made.append(continued("job", made, 1 + number % 2, index=number % 3))
    return [*made, done(made)]


@pytest.mark.parametrize("at", range(14))
def test_from_any_cursor_a_log_that_is_whole_fits(at: int) -> None:
    rest = taken(a_log(), at)
    tokens = [token for event in rest if isinstance(event, Delta) for token in event.token_ids]
    everything = [token for event in a_log()[:-1] for token in event.token_ids]  # type: ignore[union-attr]
    assert tokens == everything[at:]


def another_token(event: Delta) -> Delta:
    return replace(event, token_ids=[event.token_ids[0] + 1, *event.token_ids[1:]])


def another_choice(event: Delta) -> Delta:
    return replace(event, index=event.index + 1)


@pytest.mark.parametrize("change", [another_token, another_choice])
@pytest.mark.parametrize(("at", "first"), [(0, 0), (1, 2)])  # at 1 the first sum must be trusted
def test_a_changed_event_is_never_given_out(
    change: Callable[[Delta], Delta], at: int, first: int
) -> None:
    for place in range(first, 9):
        log, cursor, given = a_log(), Cursor("job", at), list[Event]()
        changed = log[place]
        assert isinstance(changed, Delta)
        log[place] = change(changed)
        with pytest.raises(StreamDiverged) as met:
            for event in log:
                if (rest := cursor.take(event)) is not None:
                    given.append(rest)
        assert given == log[at:place]
        assert (met.value.status, met.value.code) == (500, "stream_diverged")


def test_an_end_that_is_not_where_the_tokens_end_is_an_error() -> None:
    *made, end = a_log()
    for wrong in (replace(end, position=12), replace(end, position=14), replace(end, checksum=1)):
        with pytest.raises(StreamDiverged):
            taken([*made, wrong])


def test_events_of_a_worker_that_knows_no_checksum_pass() -> None:
    older = [replace(event, checksum=None) for event in a_log()]
    for at in range(13):
        assert taken(older, at)[-1] == older[-1]
    mixed = [*older[:4], *a_log()[4:]]
    assert len(taken(mixed)) == 10
    with pytest.raises(StreamDiverged):
        taken([another_token(mixed[0]), *mixed[1:]])  # type: ignore[arg-type]


def test_what_a_newer_worker_adds_to_an_event_is_skipped() -> None:
    line = '{"type":"delta","position":0,"token_ids":[7],"text":"x","later":{"a":[1]}}'
    assert EVENT.validate_json(line) == Delta(position=0, token_ids=[7], text="x")
    end = '{"type":"done","position":1,"usage":{"prompt_tokens":1,"later":2},"also":3}'
    assert EVENT.validate_json(end) == Done(position=1, usage=Usage(prompt_tokens=1))


def test_a_result_gives_the_checksums_of_its_log() -> None:
    *made, end = a_log()
    logged = [event for event in made if isinstance(event, Delta)]
    assert isinstance(end, Done)
    assert list(fold("job", "m", 3, logged, end).events()) == [*logged, end]


def active(log: list[Delta], num_choices: int = 2) -> ActiveJob:
    job = a_job(params={"n": num_choices})
    completions = [Completion(TEXT, job.params, frozenset()) for _ in range(num_choices)]
    return ActiveJob(Started(job, 2, log, None, 0), [[1]], completions)


def test_a_worker_goes_on_with_the_checksum_of_the_log() -> None:
    undisturbed = active([])
    log: list[Delta] = []
    for number in range(8):
        undisturbed.take(number % 2, Output("", [65 + number]))
        log += undisturbed.commit().deltas
        undisturbed.note_committed(undisturbed.commit())
    assert taken([*log]) == log
    for cut in range(8):
        older = [replace(delta, checksum=None) for delta in log[:cut]]
        for before in (log[:cut], older):
            resumed = active(before)
            for number in range(cut, 8):
                resumed.take(number % 2, Output("", [65 + number]))
                resumed.note_committed(resumed.commit())
            assert resumed.deltas == [*before, *log[cut:]]
            assert resumed.ending().end.checksum == log[-1].checksum


def test_a_worker_does_not_go_on_with_a_log_that_was_changed() -> None:
    log = deltas("job", 1, 2, 1)
    with pytest.raises(StreamDiverged):
        active([log[0], another_token(log[1]), log[2]])


def with_a_reader(
    test: Callable[[QueueClient, WorkerQueue], Awaitable[None]],
) -> Callable[[str], None]:
    def run(redis_url: str) -> None:
        async def main() -> None:
            async with queue_at(redis_url) as queue, QueueClient.from_url(redis_url) as client:
                await queue.register("w", WorkerCard())
                await asyncio.wait_for(test(client, queue), 60)

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@with_a_reader
async def test_a_log_that_lost_its_end_and_was_made_anew_is_an_error_to_who_saw_it(
    client: QueueClient, queue: WorkerQueue
) -> None:
    """As after a failover to a replica that lagged."""
    job_id = await client.enqueue("x")
    job = await started(queue)
    made = deltas(job_id, *[1] * 6)
    events = client.stream(job_id)
    await queue.commit("w", [Commit(job_id, job.epoch, made[:4])])
    assert [await anext(events) for _ in range(4)] == made[:4]
    await plain(client.redis).delete(f"{LANE.job(job_id)}:log")
    await plain(client.redis).hset(LANE.job(job_id), "position", 2)
    anew = made[:2]
    for _ in range(4):
        anew.append(continued("another", anew))
    await queue.commit("w", [Commit(job_id, job.epoch, anew[2:])])
    assert anew[2:4] != made[2:4]
    with pytest.raises(StreamDiverged):
        while True:
            await anext(events)


@with_a_reader
async def test_a_log_with_a_hole_is_an_error(client: QueueClient, queue: WorkerQueue) -> None:
    job_id = await client.enqueue("x")
    job = await started(queue)
    made = deltas(job_id, *[1] * 6)
    await queue.commit("w", [Commit(job_id, job.epoch, made)])
    await plain(client.redis).xdel(f"{LANE.job(job_id)}:log", f"{job.epoch}-0")
    with pytest.raises(StreamDiverged):
        await anext(client.stream(job_id))


@with_a_reader
async def test_a_cut_result_fits_what_its_reader_has(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await client.enqueue("x")
    job = await started(queue)
    made = deltas(job_id, 1, 2, 3)
    events = client.stream(job_id)
    await queue.commit("w", [Commit(job_id, job.epoch, made[:1])])
    got = [await anext(events)]
    await plain(client.redis).hset(LANE.job(job_id), "channels", "elsewhere")
    await finish(queue, job, made)
    await plain(client.redis).delete(f"{LANE.job(job_id)}:log")
    client._subscription._miss()
    got += [event async for event in events]
    assert got == [*made, done(made)]
    assert not isinstance(got[-1], Failed)

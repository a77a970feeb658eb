"""A router knows what a worker's prefix cache holds from the worker's stream alone."""

import asyncio
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import redis

from block_reader import BlockReader, block_hash_of, hashes_of, salt_of
from faults.proxy import Proxy
from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.errors import InvalidJob
from penstock.schemas.event import Result
from penstock.schemas.keys import Lane
from penstock.schemas.model import ModelCard, WorkerCard
from penstock.schemas.params.sampling import SamplingParams
from penstock.schemas.queue.registry import Registry
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.connection import connect
from penstock.worker.bundled.paths import BUNDLED_DRAFT
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.messages import AddSequence
from penstock.worker.engine_loader import load_engine
from penstock.worker.engine_process import EngineLoop
from penstock.worker.jobs.service import Service
from penstock.worker.llm import LLM
from penstock.worker.process.ipc import (
    BeginSession,
    BlockingWire,
    Channel,
    EndSession,
    Renewed,
    WorkerCommand,
    WorkerEvent,
)
from penstock.worker.process.sampling_defaults import Generation
from penstock.worker.process.settings import WorkerSettings
from penstock.worker.text.model_tokenizer import load_tokenizer
from worker_process import WorkerProcess, ask, incarnations, until

MODEL = BUNDLED_DRAFT.name
SECRET = "of this test, and of the router"
TENANTS = ("acme", "globex")
BLOCK = 4


@dataclass(slots=True)
class AtWork:
    """A worker on the bundled draft model, within this process: the test sees its engine."""

    url: str
    engine: Engine
    client: QueueClient
    told: Channel[WorkerEvent, WorkerCommand]
    queue: WorkerQueue
    plain: redis.Redis

    async def begin(self, incarnation: str) -> BlockReader:
        await self.queue.register(incarnation, WorkerCard())
        self.told.send(BeginSession(incarnation))
        self.told.send(Renewed(time.monotonic() + 100))
        return BlockReader(self.plain, MODEL, incarnation)

    def cached(self) -> set[str]:
        return {digest.hex() for digest in self.engine.scheduler.pool._blocks}

    async def follows(self, *readers: BlockReader) -> None:
        """Return once the idle engine's own set is what each reader has."""
        async with asyncio.timeout(30):
            while not all(reader.blocks.keys() == self.cached() for reader in readers):
                await asyncio.sleep(0.02)
                for reader in readers:
                    reader.read()

    async def answer(self, prompts: list[list[int]], max_tokens: int = 12) -> list[Result]:
        async def one(prompt: list[int], tenant: str) -> Result:
            given = {"max_tokens": max_tokens, "ignore_eos": True}
            job_id = await self.client.enqueue(prompt, tenant=tenant, **given)
            return await self.client.result(job_id, tenant=tenant)

        tenants = (TENANTS[at % 2] for at in range(len(prompts)))
        return list(await asyncio.gather(*map(one, prompts, tenants)))

    async def compute(self, prompts: list[list[int]]) -> None:
        """Straight by the engine, all at once: no job that Redis knows, no room that is kept."""
        params, num_steps = SamplingParams(max_tokens=40, ignore_eos=True), self.engine.num_steps
        for number, prompt in enumerate(prompts):
            self.engine.add(AddSequence(str(number), prompt, params))
        while self.engine.busy or self.engine.num_steps < num_steps + 40:
            await asyncio.sleep(0.02)


@asynccontextmanager
async def at_work(url: str, way: str, **given: object) -> AsyncIterator[AtWork]:
    """way  the URL by which the worker reaches Redis"""
    events = {"enable_kv_cache_events": True, "token_ids": True}
    settings = WorkerSettings.model_validate(
        {
            "model": str(BUNDLED_DRAFT),
            "redis_url": way,
            "lease_ttl_ms": 100_000,
            "block_size": BLOCK,
        }
        | {"cache_salt_secret": SECRET, "kv_events_config": events}
        | given
    )
    (io, to_engine), (pulses, _pulses), (supervisor, io_end) = (socket.socketpair() for _ in "123")
    engine = load_engine(settings)
    assert isinstance(engine, Engine)
    wires = BlockingWire(to_engine), BlockingWire(pulses)
    loop = EngineLoop(engine, *wires, 60.0, kv_events=settings.kv_events)
    threading.Thread(target=loop.run, daemon=True).start()
    async with connect(way) as link, connect(url) as own, QueueClient.from_url(url) as client:
        to_service, text = await Channel.open(io), load_tokenizer(settings)
        end = await Channel.open(io_end)
        service = Service(settings, text, Generation({}), link, to_service, end)
        running = asyncio.create_task(service.run())
        told: Channel[WorkerEvent, WorkerCommand] = await Channel.open(supervisor)
        await anext(told.received())
        await Registry(own).register(ModelCard(name=MODEL))
        queue = WorkerQueue(own, Lane(MODEL), lease_ms=100_000)
        with redis.Redis.from_url(url, decode_responses=True) as plain:
            yield AtWork(url, engine, client, told, queue, plain)
        told.close()
        await running
        to_service.close()


def run(url: str, scenario: Callable[[AtWork], Awaitable[None]], way: str = "", **given: object):
    async def main() -> None:
        async with asyncio.timeout(60), at_work(url, way or url, **given) as work:
            await scenario(work)

    asyncio.run(main())


def prompts_that_share(rng: random.Random, count: int) -> list[list[int]]:
    stems = [[rng.randrange(256) for _ in range(rng.randrange(9, 40))] for _ in range(4)]
    return [
        rng.choice(stems) + [rng.randrange(256) for _ in range(rng.randrange(1, 9))]
        for _ in range(count)
    ]


SMALL = {"num_gpu_blocks_override": 40, "max_num_seqs": 8, "max_num_batched_tokens": 32}


@pytest.mark.slow
def test_events_alone_rebuild_the_cache_through_evictions_and_preemptions(redis_url: str) -> None:
    rng = random.Random(5)

    async def scenario(work: AtWork) -> None:
        reader = await work.begin("w")
        for _ in range(2):
            await work.answer(prompts_that_share(rng, 12), max_tokens=20)
            await work.compute(prompts_that_share(rng, 12))
            late = BlockReader(work.plain, MODEL, "w")
            late.join()
            await work.follows(reader, late)
        assert reader.joins == 0 and late.joins == 1
        events = [event for batch in reader.batches for event in batch]
        assert {"BlockStored", "BlockRemoved"} < {event["type"] for event in events}
        assert work.engine.stats().num_preemptions > 0
        assert len(work.plain.xrange(f"{reader.key}events")) == len(reader.batches) > 20

    run(redis_url, scenario, **SMALL)


def test_each_block_hashes_its_parent_and_its_tokens_under_the_tenants_salt(redis_url) -> None:
    salts = [salt_of(SECRET, tenant) for tenant in TENANTS]

    async def scenario(work: AtWork) -> None:
        reader = await work.begin("w")
        prompts = prompts_that_share(random.Random(6), 10)
        results = await work.answer([*prompts, *prompts[1:]])
        await work.follows(reader)
        # The last token of a completion was drawn, and never computed.
        texts = [
            prompt + result.choices[0].token_ids[:-1]
            for prompt, result in zip([*prompts, *prompts[1:]], results, strict=True)
        ]
        expected = [hashes_of(salts[at % 2], text, BLOCK) for at, text in enumerate(texts)]
        assert reader.blocks.keys() == {each for hashes in expected for each in hashes}
        for hashes in expected:
            assert [reader.blocks[each] for each in hashes] == [None, *hashes[:-1]]
        stored = [event for batch in reader.batches for event in batch if "token_ids" in event]
        for event in stored:
            parent, token_ids = event["parent_block_hash"], event["token_ids"]
            assert len(token_ids) == BLOCK * len(event["block_hashes"])
            assert event["block_size"] == BLOCK
            for at, block_hash in enumerate(event["block_hashes"]):
                tokens = token_ids[at * BLOCK : (at + 1) * BLOCK]
                assert block_hash in [block_hash_of(parent, salt, tokens) for salt in salts]
                parent = block_hash

    run(redis_url, scenario)


def test_while_redis_is_held_changes_merge_and_who_falls_behind_finds_the_gap(
    redis_server: Server, redis_url: str
) -> None:
    rng = random.Random(7)

    async def scenario(work: AtWork) -> None:
        reader = await work.begin("w")
        await work.answer(prompts_that_share(rng, 4))
        await work.follows(reader)
        num_steps, num_batches, joins = work.engine.num_steps, len(reader.batches), reader.joins
        proxy.up.is_held = True
        await work.compute(prompts_that_share(rng, 12))
        assert work.engine.num_steps > num_steps + 40
        proxy.heal()
        await work.follows(reader)
        assert len(reader.batches) - num_batches <= 3 and reader.joins == joins
        await work.answer(prompts_that_share(rng, 8))  # more entries than the stream keeps
        await work.follows(reader)
        assert reader.joins == joins + 1
        assert work.plain.xlen(f"{reader.key}events") == 4

    with Proxy(redis_server.port) as proxy:
        events = {"enable_kv_cache_events": True, "buffer_steps": 4}
        run(redis_url, scenario, proxy.url, kv_events_config=events, **SMALL)


def test_what_redis_lost_and_a_new_incarnation_are_told_all_anew(redis_url: str) -> None:
    async def scenario(work: AtWork) -> None:
        first = await work.begin("w")
        await work.answer(prompts_that_share(random.Random(8), 6))
        await work.queue.beat("w")  # for longer than the worker's own commits
        await work.follows(first)
        work.plain.delete(f"{first.key}events", f"{first.key}blocks")
        while not work.plain.exists(f"{first.key}blocks"):  # the idle worker looks by itself
            await asyncio.sleep(0.02)
        first.read()
        assert first.batches[-1][0] == {"type": "AllBlocksCleared"} and first.joins == 0
        await work.follows(first)
        work.told.send(EndSession())
        await work.queue.unregister("w")
        assert not work.plain.exists(f"{first.key}events", f"{first.key}blocks")
        second = await work.begin("w2")
        await work.follows(second)
        assert second.blocks and not work.plain.exists(f"{first.key}events", f"{first.key}blocks")

    run(redis_url, scenario, lease_ttl_ms=1500)


def test_nobody_follows_and_no_key_is_written_unless_it_is_asked_for(redis_url: str) -> None:
    async def scenario(work: AtWork) -> None:
        reader = await work.begin("w")
        await work.answer(prompts_that_share(random.Random(9), 6))
        assert work.cached() and work.engine.scheduler.pool.changes is None
        assert not work.plain.exists(f"{reader.key}events", f"{reader.key}blocks")

    run(redis_url, scenario, kv_events_config={})


@pytest.mark.slow
def test_a_killed_workers_stream_goes_with_its_lease_and_never_held_a_token(redis_url) -> None:
    prompts = prompts_that_share(random.Random(10), 6)
    texts = list[list[int]]()

    async def asks(client: QueueClient) -> None:
        for prompt in prompts:
            result = await client.result(await client.enqueue(prompt, max_tokens=20))
            texts.append(prompt + result.choices[0].token_ids[:-1])

    flags = ("--kv-events-config", '{"enable_kv_cache_events": true}')
    salt = ("--block-size", str(BLOCK), "--cache-salt-secret", SECRET, "--lease-ttl-ms", "2000")
    with (
        WorkerProcess(redis_url, BUNDLED_DRAFT, *flags, *salt) as worker,
        redis.Redis.from_url(redis_url, decode_responses=True) as plain,
    ):
        worker.ready()
        ask(redis_url, asks)
        reader = BlockReader(plain, MODEL, *incarnations(redis_url, MODEL))
        expected = {
            each for text in texts for each in hashes_of(salt_of(SECRET, "default"), text, BLOCK)
        }

        def has_all() -> bool:
            reader.read()
            return reader.blocks.keys() == expected

        until(has_all, "the events of all blocks", 30)
        keys = f"{reader.key}events", f"{reader.key}blocks"
        assert all(0 < plain.pttl(key) <= 2000 for key in keys)
        assert "token_ids" not in f"{plain.xrange(keys[0])} {plain.hgetall(keys[1])}"
        worker.kill()
        until(lambda: not plain.exists(*keys), "the stream to go", 10)


def test_llm_has_no_router_to_tell() -> None:
    with pytest.raises(InvalidJob, match="kv_events_config: tells routers"):
        LLM("penstock-5m", kv_events_config={"enable_kv_cache_events": True})

"""Models from their first worker to the day on which nobody knows them any more."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx
import pytest
import redis
from pydantic import JsonValue

from keys_page import complaints
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.tasks.known_models import UNUSED_SINCE, KnownModels
from penstock.schemas.errors import JobNotFound, ModelInUse, ModelNotFound
from penstock.schemas.keys import MODELS, Lane
from penstock.schemas.model import ModelCard, WorkerCard
from penstock.schemas.queue.queue import Queue
from penstock.schemas.queue.registry import Registry
from penstock.schemas.queue.worker_queue import WorkerQueue
from stage import GatewayProcess, HousekeepingProcess, eventually
from worker_process import WorkerProcess

GONE, BRIEF = "gone/for-good", 1e-9  # in days


@contextmanager
def store(url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(url) as server:
        yield server


@asynccontextmanager
async def model(url: str, name: str = GONE, lanes: int = 2) -> AsyncIterator[QueueClient]:
    """A client of a model that a worker served and serves no longer."""
    async with QueueClient.from_url(url) as client:
        await Registry(client.redis).register(ModelCard(name=name, lanes=lanes))
        for number in range(lanes):
            queue = WorkerQueue(client.redis, Lane(name, number))
            await queue.register("w", WorkerCard())
            await queue.read("w", 1)
            await queue.unregister("w")
        yield client


async def forgotten(client: QueueClient, days: float = BRIEF) -> list[str]:
    """What the second of two looks forgets: the first notes since when."""
    await KnownModels(client).forget_unused(days)
    await asyncio.sleep(0.01)
    return await KnownModels(client).forget_unused(days)


def test_only_what_is_served_is_listed_and_first_what_answers_chats(redis_url: str) -> None:
    flags = ("--served-model-name", "zebra", "--max-model-len", "512")
    with GatewayProcess(redis_url) as gateway, WorkerProcess(redis_url, "fake", *flags) as worker:
        worker.ready()

        async def others() -> None:
            async with model(redis_url) as client:
                features: dict[str, JsonValue] = {
                    "task": "embed",
                    "numerics": "weights are rounded to int8 at the start",
                }
                embedder = ModelCard(name="aardvark", features=features)
                await Registry(client.redis).register(embedder)
                await WorkerQueue(client.redis, Lane("aardvark"), 60_000).register(
                    "e", WorkerCard()
                )

        def listed(query: str = "") -> list[dict[str, object]]:
            found: list[dict[str, object]] = httpx.get(f"{gateway.url}/v1/models{query}").json()[
                "data"
            ]
            return found

        asyncio.run(others())
        eventually(lambda: len(listed()) == 2, within_s=20)
        zebra, aardvark = listed()
        told = {key: zebra[key] for key in ("id", "task", "num_workers", "context", "numerics")}
        wanted = {"id": "zebra", "task": "generate", "num_workers": 1, "context": 512}
        assert told == wanted | {"numerics": None}
        assert aardvark["numerics"] == "weights are rounded to int8 at the start"
        assert zebra["max_model_len"] == 512
        assert (aardvark["id"], aardvark["task"]) == ("aardvark", "embed")
        whole = {each["id"]: each["num_workers"] for each in listed("?all=true")}
        assert whole == {"zebra": 1, "aardvark": 1, GONE: 0}
        one = httpx.get(f"{gateway.url}/v1/models/{GONE}").json()
        assert (one["id"], one["num_workers"]) == (GONE, 0)
        wrong = httpx.get(f"{gateway.url}/v1/models?all=perhaps")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "all")
        seen = httpx.get(f"{gateway.url}/v1/status").json()["models"]
        assert {each["name"]: each["chats"] for each in seen} == {
            "zebra": True,
            "aardvark": False,
            GONE: True,
        }


def command(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "penstock.compose.cli", "models", *words, "--redis-url", url]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)


def test_an_operator_lists_and_removes_what_nobody_serves(redis_url: str) -> None:
    async def prepare() -> None:
        async with model(redis_url), model(redis_url, "busy") as client:
            await client.enqueue("x", model="busy", background=True)

    asyncio.run(prepare())
    shown = json.loads(command(redis_url, "list", "--json").stdout)
    assert {each["name"]: (each["num_workers"], each["num_queued"]) for each in shown} == {
        "busy": (0, 1),
        GONE: (0, 0),
    }
    assert GONE in command(redis_url, "list").stdout
    refused = command(redis_url, "remove", "busy")
    assert refused.returncode == 1 and "0 workers, and 1 job not ended" in refused.stderr
    unknown = command(redis_url, "remove", "nobody")
    assert unknown.returncode == 1 and "'nobody' is not served here" in unknown.stderr
    done = command(redis_url, "remove", GONE)
    assert (done.returncode, done.stdout) == (0, f"{GONE} was removed\n")
    with store(redis_url) as server:
        assert server.hkeys(MODELS) == [b"busy"]
        assert list(server.scan_iter(f"penstock:{{{GONE}:*")) == []
    assert command(redis_url, "remove", GONE).returncode == 1
    assert command(redis_url).returncode == 2


@pytest.mark.parametrize("use", ["a worker", "a job", "a dead letter", "a kept result"])
def test_what_is_in_use_is_not_forgotten(redis_url: str, use: str) -> None:
    async def main() -> None:
        async with model(redis_url) as client:
            lane = WorkerQueue(client.redis, Lane(GONE, 1), 60_000)
            if use == "a worker":
                await lane.register("v", WorkerCard())
            elif use == "a job":
                await client.enqueue("x", model=GONE, background=True)
            elif use == "a dead letter":
                with store(redis_url) as server:
                    server.xadd(f"{lane.lane.prefix}dead", {"job": "j"})
            else:
                job_id = await client.enqueue("x", model=GONE, background=True)
                await client.cancel(job_id)
            assert await forgotten(client) == []
            assert GONE in await Registry(client.redis).cards()
            if use in ("a worker", "a job"):
                with pytest.raises(ModelInUse):
                    await KnownModels(client).remove(GONE)

    asyncio.run(main())


def test_what_nobody_used_for_so_long_is_forgotten_with_all_that_it_left(redis_url: str) -> None:
    async def main() -> None:
        async with model(redis_url) as client:
            job_id = Lane(GONE, 1).new_job_id()
            assert (await client._lanes.queue(job_id)).lane.model == GONE
            assert await forgotten(client, days=1) == []
            with store(redis_url) as server:
                assert server.hkeys(UNUSED_SINCE) == [GONE.encode()]
                assert list(server.scan_iter(f"penstock:{{{GONE}:*")) != []
                assert complaints(server) == []
            assert await KnownModels(client).forget_unused(BRIEF) == [GONE]
            with store(redis_url) as server:
                assert list(server.scan_iter("penstock:*")) == []
            with pytest.raises(ModelNotFound):
                await client.enqueue("x", model=GONE, background=True)
            with pytest.raises(JobNotFound):
                await client._lanes.queue(job_id)
            assert client._lanes._queues == {}

    asyncio.run(main())


def test_use_in_between_begins_the_time_anew(redis_url: str) -> None:
    async def main() -> None:
        async with model(redis_url) as client:
            models, queue = KnownModels(client), WorkerQueue(client.redis, Lane(GONE), 60_000)
            await models.forget_unused(BRIEF)
            await queue.register("v", WorkerCard())
            await models.forget_unused(BRIEF)
            await queue.unregister("v")
            assert await models.forget_unused(BRIEF) == []
            await asyncio.sleep(0.01)
            assert await models.forget_unused(BRIEF) == [GONE]

    asyncio.run(main())


def test_a_model_that_comes_into_use_while_it_is_forgotten_is_put_back(redis_url: str) -> None:
    async def main() -> None:
        async with model(redis_url) as client, QueueClient.from_url(redis_url) as late:
            await late.models()
            await KnownModels(client).forget_unused(BRIEF)
            await asyncio.sleep(0.01)
            forgets = asyncio.create_task(KnownModels(client).forget_unused(BRIEF))
            registry = Registry(client.redis)
            async with asyncio.timeout(30):
                while await registry.cards():
                    await asyncio.sleep(0.001)
            job_id = await late.enqueue("x", model=GONE, background=True)
            assert await forgets == []
            assert GONE in await registry.cards()
            assert (await client.status(job_id)).state == "ready"

    asyncio.run(main())


def test_housekeeping_forgets_by_itself(redis_url: str) -> None:
    async def prepare() -> None:
        async with model(redis_url):
            pass

    def names(server: redis.Redis) -> set[bytes]:
        return {*server.hkeys(MODELS)}

    asyncio.run(prepare())
    with store(redis_url) as server:
        with HousekeepingProcess(redis_url, "--models-kept-days", "1"):
            eventually(lambda: server.hexists(UNUSED_SINCE, GONE), within_s=30)
        server.hset(UNUSED_SINCE, GONE, 1)
        with HousekeepingProcess(redis_url, "--models-kept-days", "0"):
            eventually(lambda: server.ttl("penstock:{chores}:signature") > 0, within_s=30)
            assert names(server) == {GONE.encode()}
        with HousekeepingProcess(redis_url, "--models-kept-days", "1"):
            eventually(lambda: not names(server), within_s=30)


def test_lanes_of_one_server_are_searched_for_kept_jobs_of_their_own(redis_url: str) -> None:
    """A name may hold what is a pattern of Redis."""

    async def main() -> None:
        async with model(redis_url, "m*", 1) as client, model(redis_url, "my", 1):
            job_id = await client.enqueue("x", model="my", background=True)
            await client.cancel(job_id)
            kept = [await Queue(client.redis, Lane(name)).keeps_jobs() for name in ("m*", "my")]
            assert kept == [False, True]

    asyncio.run(main())

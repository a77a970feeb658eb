"""durability=replicas: a replica that is promoted has all that was answered and shown."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

import httpx
import pytest

from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.delivery import Commit
from penstock.schemas.errors import JobNotFound, NotDurable
from penstock.schemas.event import Event
from penstock.schemas.model import WorkerCard
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.connection import connect
from penstock.schemas.redis.group_sync import Durability
from penstock.schemas.redis.server_check import UnfitServer, check_disks, check_servers
from replica import OldServer, Pair, has_waitaof, pair
from scripted import MODEL, deltas, finish, queue_at, started
from stage import GatewayProcess, eventually

T = TypeVar("T")
IN_A_SECOND = "?timeout_s=1"  # so long replies, and a little less replicas, are waited for


@pytest.fixture(params=[Server, OldServer])
def two(request: pytest.FixtureRequest, redis_server: Server) -> Iterator[Pair]:
    """With WAITAOF and without."""
    if request.param is OldServer and not has_waitaof(redis_server):
        pytest.skip("the server lacks WAITAOF by itself")
    with pair(request.param) as two:
        yield two


@asynccontextmanager
async def kept(two: Pair, durability: Durability) -> AsyncIterator[tuple[QueueClient, WorkerQueue]]:
    """A client that finds the primary of the two, beside a queue for the worker's part."""
    url = f"redis://127.0.0.1:{two.primary.port},127.0.0.1:{two.replica.port}"
    async with queue_at(two.primary.url) as queue, asyncio.timeout(60):
        await queue.register("w", WorkerCard())
        async with QueueClient.from_url(url, durability=durability) as client:
            yield client, queue


async def is_pending(task: asyncio.Task[T]) -> bool:
    done, _ = await asyncio.wait([task], timeout=0.5)
    return not done


def test_nothing_is_accepted_shown_or_ended_while_the_replica_is_frozen(two: Pair) -> None:
    async def main() -> None:
        async with kept(two, "replicas") as (client, queue):
            job_id = await client.enqueue("x", model=MODEL, background=True)
            taken = await started(queue)
            made = deltas(job_id, 1, 1, 1)
            shown: list[Event] = []

            async def read() -> None:
                async for event in client.stream(job_id):
                    shown.append(event)

            reading = asyncio.create_task(read())
            await queue.commit("w", [Commit(job_id, taken.epoch, made[:1])])
            while shown != made[:1]:
                await asyncio.sleep(0.01)
            two.freeze()
            accepting = asyncio.create_task(client.enqueue("y", model=MODEL, background=True))
            await queue.commit("w", [Commit(job_id, taken.epoch, made[1:2])])
            await finish(queue, taken, made)
            ending = asyncio.create_task(client.result(job_id, wait=False))
            assert await is_pending(accepting) and await is_pending(ending)
            assert shown == made[:1]
            two.freeze(False)
            await reading
            assert shown[:-1] == made
            assert (await accepting).startswith("job_")
            assert await ending is not None

    asyncio.run(main())


@pytest.mark.parametrize("durability, is_lost", [("server", True), ("replicas", False)])
def test_a_promoted_replica_has_all_that_was_answered_and_shown(
    two: Pair, durability: Durability, is_lost: bool
) -> None:
    """With durability `server` it lacks what it had not heard: so the test can fail."""
    answered: list[str] = []
    shown: list[Event] = []

    async def before() -> str:
        async with kept(two, durability) as (client, queue):
            job_id = await client.enqueue("x", model=MODEL, background=True)
            taken = await started(queue)
            made = deltas(job_id, 1, 1, 1, 1)

            async def submit() -> None:
                answered.append(await client.enqueue("y", model=MODEL, background=True))

            async def read() -> None:
                async for event in client.stream(job_id):
                    shown.append(event)

            await asyncio.gather(*(submit() for _ in range(8)))
            reading = asyncio.create_task(read())
            await queue.commit("w", [Commit(job_id, taken.epoch, made[:2])])
            while shown != made[:2]:
                await asyncio.sleep(0.01)
            two.lag()
            await queue.commit("w", [Commit(job_id, taken.epoch, made[2:])])
            asked = [reading, *(asyncio.create_task(submit()) for _ in range(8))]
            await asyncio.wait(asked, timeout=0.5)
            two.promote()
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return job_id

    async def after(job_id: str) -> None:
        async with QueueClient.from_url(two.replica.url) as client:
            lost = [each for each in answered if not await is_known(client, each)]
            num_tokens = (await client.status(job_id)).num_tokens
        assert len(answered) == (16 if is_lost else 8)
        assert len(lost) == (8 if is_lost else 0)
        assert (num_tokens, len(shown)) == (2, 4 if is_lost else 2)

    asyncio.run(after(asyncio.run(before())))


async def is_known(client: QueueClient, job_id: str) -> bool:
    try:
        await client.status(job_id)
    except JobNotFound:
        return False
    return True


@pytest.mark.slow
def test_without_a_replica_it_is_refused_by_name_until_one_is_back() -> None:
    with pair() as two:
        two.replica.kill()
        with (
            GatewayProcess(two.primary.url + IN_A_SECOND, "--durability", "replicas") as gateway,
            httpx.Client(base_url=gateway.url, timeout=60) as http,
        ):

            async def num_queued() -> int:
                async with queue_at(two.primary.url) as queue:
                    await queue.register("w", WorkerCard())
                    return (await queue.counts()).num_queued

            def submit() -> httpx.Response:
                return http.post("/v1/jobs", json={"model": MODEL, "prompt": "x"})

            def is_refused() -> None:
                refusal = submit()
                assert refusal.status_code == 503 and refusal.headers["x-should-retry"] == "true"
                assert refusal.headers["retry-after"] == "1"
                error = refusal.json()["error"]
                assert error["code"] == "not_durable"
                assert f"127.0.0.1:{two.primary.port} has no replica; start one" in error["message"]

            assert asyncio.run(num_queued()) == 0
            is_refused()
            assert asyncio.run(num_queued()) == 0, "a job was refused, and runs"
            assert gateway.log.read_text().count("has no replica; start one") == 2
            two.replica.start()
            two.follow()
            eventually(lambda: submit().status_code == 202)
            two.replica.kill()
            is_refused()
            num_left = asyncio.run(num_queued())
            is_refused()
            assert asyncio.run(num_queued()) == num_left
            two.replica.start()
            two.follow()
            eventually(lambda: submit().status_code == 202)


def checked(url: str, durability: Durability) -> tuple[list[str], list[str]]:
    async def main() -> tuple[list[str], list[str]]:
        async with connect(url) as link:
            return await check_servers(link, durability), await check_disks(link, durability)

    return asyncio.run(main())


def test_a_replica_that_writes_no_file_is_named(redis_server: Server) -> None:
    if not has_waitaof(redis_server):
        pytest.skip("the server cannot tell")
    with pair(appendonly="no") as two:
        url = f"redis://127.0.0.1:{two.primary.port}"
        warnings, (fault,) = checked(url + IN_A_SECOND, "replicas")
        assert not warnings
        assert f"a replica of 127.0.0.1:{two.primary.port} has it in memory" in fault
        assert "set appendonly yes there" in fault
        both = f"{url},127.0.0.1:{two.replica.port}"
        with pytest.raises(UnfitServer, match=f"{two.replica.port}: durability replicas needs app"):
            checked(both, "replicas")


def test_a_url_that_names_the_replica_too_is_as_good(two: Pair) -> None:
    url = f"redis://127.0.0.1:{two.primary.port},127.0.0.1:{two.replica.port}"
    is_new = has_waitaof(two.primary)
    warnings, faults = checked(url, "replicas")
    assert not faults
    assert [text.split(": ")[1] for text in warnings] == (
        [] if is_new else ["what is answered is in a replica's memory alone"]
    )
    if is_new:
        assert checked(url, "fsync") == ([], [])


def test_a_lagging_replica_is_told_from_one_that_is_not_there() -> None:
    async def main(two: Pair) -> None:
        url = two.primary.url + IN_A_SECOND
        async with queue_at(url), QueueClient.from_url(url, durability="replicas") as client:
            two.freeze()
            with pytest.raises(NotDurable, match=r"has 1 replica, of which none confirmed"):
                await client.enqueue("x", model=MODEL, background=True)

    with pair() as two:
        asyncio.run(main(two))

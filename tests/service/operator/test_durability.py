"""durability=fsync: what was accepted or shown survives the loss of everything not on the disk."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.tasks.outbox import Ended, Note, drain
from penstock.schemas.delivery import Commit
from penstock.schemas.errors import JobNotFound, QueueUnreachable
from penstock.schemas.event import Event
from penstock.schemas.model import WorkerCard
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.group_sync import GroupSync
from plain import plain
from scripted import LANE, MODEL, a_job, deltas, finish, queue_at, started
from stage import GatewayProcess, eventually

T = TypeVar("T")


@pytest.fixture
def disk_server(tmp_path: Path) -> Iterator[Server]:
    with Server(folder=tmp_path / "redis") as server:
        yield server


def file_of(server: Server) -> Path:
    """What is appended to: one file before 7.0, then the last of a folder."""
    found = [*server.folder.glob("appendonlydir/*.incr.aof"), *server.folder.glob("*.aof")]
    return max(found)


@asynccontextmanager
async def kept(server: Server) -> AsyncIterator[tuple[QueueClient, WorkerQueue]]:
    """A client that asks for the disk, beside a queue for the worker's part."""
    async with queue_at(server.url) as queue:
        await queue.register("w", WorkerCard())
        async with QueueClient.from_url(server.url, durability="fsync") as client:
            yield client, queue


async def disk(queue: WorkerQueue, takes: str) -> None:
    """Whether the server writes its file through: `everysec`, or `no` more."""
    await plain(queue.connection.redis).config_set("appendfsync", takes)


def over(server: Server, test: Callable[[QueueClient, WorkerQueue], Awaitable[None]]) -> None:
    async def main() -> None:
        async with kept(server) as (client, queue), asyncio.timeout(90):
            await test(client, queue)

    asyncio.run(main())


async def is_pending(task: asyncio.Task[T]) -> bool:
    done, _ = await asyncio.wait([task], timeout=1.0)
    return not done


def test_nothing_is_accepted_or_shown_before_it_is_on_the_disk(disk_server: Server) -> None:
    async def test(client: QueueClient, queue: WorkerQueue) -> None:
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
        await disk(queue, "no")
        accepting = asyncio.create_task(client.enqueue("y", model=MODEL, background=True))
        await queue.commit("w", [Commit(job_id, taken.epoch, made[1:2])])
        await finish(queue, taken, made)
        ending = asyncio.create_task(client.result(job_id, wait=False))
        assert await is_pending(accepting) and await is_pending(ending)
        assert shown == made[:1]
        await disk(queue, "everysec")
        await reading
        assert shown[:-1] == made
        assert (await accepting).startswith("job_")
        assert await ending is not None

    over(disk_server, test)


def test_what_was_not_known_to_be_on_the_disk_is_asked_for_again(disk_server: Server) -> None:
    async def test(client: QueueClient, queue: WorkerQueue) -> None:
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
        await disk(queue, "no")
        await queue.commit("w", [Commit(job_id, taken.epoch, made[1:2])])
        assert await is_pending(reading) and shown == made[:1]
        await plain(queue.connection.redis).client_kill_filter(_type="normal")
        await disk(queue, "everysec")
        await finish(queue, taken, made)
        await reading
        assert shown[:-1] == made

    over(disk_server, test)


def test_an_end_is_not_told_before_it_is_on_the_disk(disk_server: Server) -> None:
    """Neither a cancelled job nor an erased one comes back, nor one that somebody heard ended."""

    async def test(client: QueueClient, queue: WorkerQueue) -> None:
        told: list[Ended] = []

        async def hand_on(ended: Ended) -> None:
            told.append(ended)

        waiting = await client.enqueue("x", model=MODEL, background=True)
        taken = await started(queue)
        unread = [
            await client.enqueue("y", model=MODEL, background=True, delay_ms=3_600_000)
            for _ in range(2)
        ]
        noted = a_job(background=True)
        await client.submit(noted, note=Note(webhook="").dump())
        noted_taken = await started(queue)
        await disk(queue, "no")
        await finish(queue, taken, deltas(waiting, 1))
        await finish(queue, noted_taken, deltas(noted.job_id, 1))
        sync = GroupSync(client.redis)
        answers = [
            asyncio.create_task(client.status(waiting)),
            asyncio.create_task(client.cancel(unread[0])),
            asyncio.create_task(client.delete(unread[1])),
            asyncio.create_task(drain(client.redis, LANE, sync, hand_on)),
        ]
        done, _ = await asyncio.wait(answers, timeout=1.0)
        assert not done and not told
        await disk(queue, "everysec")
        await asyncio.gather(*answers)
        assert [ended.job for ended in told] == [noted.job_id]
        sync.close()

    over(disk_server, test)


@pytest.mark.slow
def test_over_http_what_was_answered_is_not_taken_back(disk_server: Server) -> None:
    """A gateway's process: a power loss takes what it did not answer, and nothing else."""
    jobs, body = "/v1/jobs", {"model": MODEL, "prompt": "x"}
    with (
        GatewayProcess(disk_server.url, "--durability", "fsync") as gateway,
        httpx.Client(base_url=gateway.url, timeout=60) as http,
    ):

        def taking(takes: str) -> None:
            async def change(client: QueueClient, queue: WorkerQueue) -> None:
                await disk(queue, takes)

            over(disk_server, change)

        taking("everysec")
        made = [http.post(jobs, json=body).json()["id"] for _ in range(4)]
        kept, spared, cancelled, erased = made
        assert http.post(f"{jobs}/{cancelled}/cancel").status_code == 200
        assert http.delete(f"{jobs}/{erased}").is_success
        size = file_of(disk_server).stat().st_size
        taking("no")
        with ThreadPoolExecutor(3) as callers:  # all wait for the disk, for as long as anybody may
            asked = [
                callers.submit(http.post, jobs, json=body),
                callers.submit(http.post, f"{jobs}/{kept}/cancel"),
                callers.submit(http.delete, f"{jobs}/{spared}"),
            ]
            refusals = [each.result() for each in asked]
        assert {each.status_code for each in refusals} == {503}
        assert {each.headers["x-should-retry"] for each in refusals} == {"true"}
        disk_server.kill()
        os.truncate(file_of(disk_server), size)
        disk_server.start()
        eventually(lambda: http.get("/health/live").is_success)
        states = [http.get(f"{jobs}/{each}") for each in made]
        assert [each.status_code for each in states] == [200, 200, 200, 404]
        assert [each.json()["state"] for each in states[:3]] == ["ready", "ready", "cancelled"]


def test_a_disk_that_takes_too_long_is_an_error_that_may_be_tried_again(
    disk_server: Server,
) -> None:
    async def test(client: QueueClient, queue: WorkerQueue) -> None:
        await client.models()
        await disk(queue, "no")
        with pytest.raises(QueueUnreachable, match="disk") as refusal:
            await client.enqueue("x", model=MODEL, background=True, idempotency_key="k")
        assert refusal.value.retryable
        await disk(queue, "everysec")
        await client.enqueue("x", model=MODEL, background=True, idempotency_key="k")
        assert (await queue.counts()).num_queued == 1

    over(disk_server, test)


def test_one_wait_serves_all_who_came_meanwhile(disk_server: Server) -> None:
    async def test(client: QueueClient, queue: WorkerQueue) -> None:
        await asyncio.gather(
            *(client.enqueue("x", model=MODEL, background=True) for _ in range(200))
        )
        stats = await plain(queue.connection.redis).info("commandstats")
        assert 1 <= stats["cmdstat_waitaof"]["calls"] <= 100

    over(disk_server, test)


def test_with_the_tail_of_the_file_what_was_promised_is_not_lost(disk_server: Server) -> None:
    """Power loss: the file ends where it was written through last."""

    async def before(client: QueueClient, queue: WorkerQueue) -> None:
        async with QueueClient.from_url(disk_server.url) as hasty:
            await client.models()
            kept_id = await client.enqueue("kept", model=MODEL, background=True)
            taken = await started(queue)
            made = deltas(kept_id, 1, 1, 1, 1)
            await queue.commit("w", [Commit(kept_id, taken.epoch, made[:2])])
            events = client.stream(kept_id)
            seen.extend([await anext(events), await anext(events)])
            size = file_of(disk_server).stat().st_size
            await disk(queue, "no")
            await queue.commit("w", [Commit(kept_id, taken.epoch, made[2:])])
            lost_id = await hasty.enqueue("lost", model=MODEL, background=True)
            await events.aclose()
            ids.extend([kept_id, lost_id])
        disk_server.kill()
        os.truncate(file_of(disk_server), size)
        disk_server.start()

    async def after(client: QueueClient, queue: WorkerQueue) -> None:
        kept_id, lost_id = ids
        assert (await client.status(kept_id)).num_tokens == 2
        with pytest.raises(JobNotFound):
            await client.status(lost_id)
        assert (await queue.counts()).num_running == 1
        await queue.unregister("w")
        await queue.register("v", WorkerCard())
        taken = await started(queue, "v")
        made = deltas(kept_id, 1, 1, 1, 1)
        assert taken.log == made[:2] == seen
        await finish(queue, taken, made, "v")
        assert [event async for event in client.stream(kept_id, 2)][:-1] == made[2:]

    ids: list[str] = []
    seen: list[Event] = []
    over(disk_server, before)
    over(disk_server, after)


def test_a_server_that_was_away_in_between_is_not_taken_at_its_word(disk_server: Server) -> None:
    async def test(client: QueueClient, queue: WorkerQueue) -> None:
        sync = GroupSync(client.redis)
        mark = await sync.begin(LANE.prefix)
        await sync.wait(mark)
        disk_server.kill()
        disk_server.start()
        with pytest.raises(QueueUnreachable):
            await sync.wait(mark)
        again = await sync.begin(LANE.prefix)
        assert again is not mark
        await sync.wait(again)
        sync.close()

    over(disk_server, test)

"""Many readers of one job, slow ones, late ones: each gets all of it, and none costs the others."""

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from itertools import pairwise

import httpx

from penstock.gateway.follow.pages import PAGES_AT_ONCE
from penstock.gateway.follow.reader import Reader
from penstock.gateway.queue_client import PIECE, QueueClient
from penstock.loadtest.machine.usage import memory_bytes
from penstock.schemas.delivery import Commit
from penstock.schemas.event import Delta, Event
from penstock.schemas.model import WorkerCard
from penstock.schemas.queue.queue import PAGE
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.connection import connect
from plain import plain
from scripted import LANE, MODEL, continued, deltas, done, finish, queue_at, started
from stage import GatewayProcess

LONG_S = 600.0  # of silence: something else must wake a reader


def with_a_reader(
    silence_s: float = 5.0, max_unread: int = 256
) -> Callable[[Callable[[QueueClient, WorkerQueue], Awaitable[None]]], Callable[[str], None]]:
    """The test drives the worker `w` itself; the client has these bounds."""

    def decorate(
        test: Callable[[QueueClient, WorkerQueue], Awaitable[None]],
    ) -> Callable[[str], None]:
        def run(redis_url: str) -> None:
            async def main() -> None:
                async with (
                    queue_at(redis_url) as queue,
                    QueueClient(
                        connect(redis_url), silence_s=silence_s, max_unread=max_unread
                    ) as client,
                ):
                    await queue.register("w", WorkerCard())
                    await asyncio.wait_for(test(client, queue), 90)

            asyncio.run(main())

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


async def all_of(client: QueueClient, job_id: str) -> list[Event]:
    async with aclosing(client.stream(job_id)) as events:
        return [event async for event in events]


def test_a_reader_that_is_full_asks_the_log_and_holds_nothing() -> None:
    async def main() -> None:
        reader, made = Reader(8), deltas("job", *[1] * 9)
        for delta in made[:8]:
            reader.put(delta)
        assert await reader.take() == made[:8]
        for delta in made:
            reader.put(delta)
        assert reader.num_unread == 0
        assert await asyncio.wait_for(reader.take(), 30) == []
        reader.put(made[0])
        assert reader.num_unread == 0  # until it has asked
        reader.begin()
        reader.put(made[1])
        assert await reader.take() == [made[1]]

    asyncio.run(main())


@with_a_reader(silence_s=LONG_S, max_unread=8)
async def test_a_reader_who_slept_through_the_end_pages_it_from_the_log(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await client.enqueue("x", background=True)
    taken = await started(queue)
    made = deltas(job_id, *[1] * (2 * PAGE + 100))
    await queue.commit("w", [Commit(job_id, taken.epoch, made[:1])])
    async with aclosing(client.stream(job_id)) as events:
        got: list[Event] = [await anext(events)]
        for at in range(1, len(made), 300):
            await queue.commit("w", [Commit(job_id, taken.epoch, made[at : at + 300])])
        await finish(queue, taken, made)
        assert len(await all_of(client, job_id)) == len(made) + 1  # so all is published
        ((reader,),) = client._subscription._readers.values()
        assert reader.num_unread <= 8
        got += [event async for event in events]
    assert got == [*made, done(made)]


@with_a_reader(silence_s=LONG_S)
async def test_what_was_published_while_the_connection_was_lost_is_asked_for_at_once(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await client.enqueue("x", background=True)
    taken = await started(queue)
    made = deltas(job_id, 1, 2)
    await queue.commit("w", [Commit(job_id, taken.epoch, made[:1])])
    async with aclosing(client.stream(job_id)) as events:
        got: list[Event] = [await anext(events)]
        rest = asyncio.create_task(anext(events))
        await asyncio.sleep(0.1)  # it waits by now
        await plain(client.redis).hset(LANE.job(job_id), "channels", "elsewhere")
        await finish(queue, taken, made)
        await plain(client.redis).execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        got.append(await rest)
        got += [event async for event in events]
    assert got == [*made, done(made)]


@with_a_reader(silence_s=LONG_S)
async def test_who_missed_something_asks_the_log_once_and_then_waits_again(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await client.enqueue("x", background=True)
    taken = await started(queue)
    made = deltas(job_id, 1, 2)
    await queue.commit("w", [Commit(job_id, taken.epoch, made[:1])])

    async def num_scripts() -> int:
        info = await plain(client.redis).info("commandstats")
        return int(info["cmdstat_evalsha"]["calls"])

    async with aclosing(client.stream(job_id)) as events:
        assert await anext(events) == made[0]
        rest = asyncio.create_task(anext(events))
        await asyncio.sleep(0.1)  # it waits by now
        before = await num_scripts()
        client._subscription._miss()
        await asyncio.sleep(0.5)
        assert await num_scripts() == before + 1
        await queue.commit("w", [Commit(job_id, taken.epoch, made[1:])])
        assert await rest == made[1]


@with_a_reader(silence_s=LONG_S)
async def test_a_subscriber_that_connects_anew_every_50_ms_misses_nothing(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await client.enqueue("x", background=True)
    taken = await started(queue)
    made = deltas(job_id, *[1] * 60)

    async def cut() -> None:
        while True:
            await plain(client.redis).execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            await asyncio.sleep(0.05)

    cutting, reading = asyncio.create_task(cut()), asyncio.create_task(all_of(client, job_id))
    for delta in made:
        await queue.commit("w", [Commit(job_id, taken.epoch, [delta])])
        await asyncio.sleep(0.02)
    await finish(queue, taken, made)
    await asyncio.sleep(0.2)
    cutting.cancel()
    assert await reading == [*made, done(made)]


@with_a_reader()
async def test_sixty_long_logs_are_read_without_holding_up_the_loop(
    client: QueueClient, queue: WorkerQueue
) -> None:
    """Nor other calls. Counted in events that are read meanwhile, not in time."""
    job_id = await client.enqueue("x", background=True)
    taken = await started(queue)
    made = deltas(job_id, *[1] * (3 * PAGE))
    for at in range(0, len(made), PAGE):
        await queue.commit("w", [Commit(job_id, taken.epoch, made[at : at + PAGE])])
    await finish(queue, taken, made)
    num_read = 0

    async def read() -> None:
        nonlocal num_read
        async with aclosing(client.event_batches(job_id)) as batches:
            async for batch in batches:
                num_read += len(batch)

    turns: list[int] = []

    async def turn() -> None:
        while True:
            turns.append(num_read)
            await asyncio.sleep(0)

    waits: list[int] = []

    async def ask() -> None:
        while True:
            before = num_read
            await client.status(job_id)
            waits.append(num_read - before)

    others = [asyncio.create_task(turn()), asyncio.create_task(ask())]
    await asyncio.gather(*(read() for _ in range(60)))
    for task in others:
        task.cancel()
    assert num_read == 60 * (len(made) + 1)
    most = max(after - before for before, after in pairwise(turns))
    assert most <= 2 * PIECE
    assert sorted(waits)[len(waits) // 2] <= PAGE  # of 60; the server may be held up at times


async def ended(client: QueueClient, queue: WorkerQueue, num_tokens: int, tenant: str) -> str:
    """Return the id of a job that has ended, with one event a token."""
    job_id = await client.enqueue("x", background=True, tenant=tenant)
    taken = await started(queue)
    made = deltas(job_id, *[1] * num_tokens)
    for at in range(0, len(made), PAGE):
        await queue.commit("w", [Commit(job_id, taken.epoch, made[at : at + PAGE])])
    await finish(queue, taken, made)
    return job_id


@with_a_reader()
async def test_a_page_is_read_once_for_all_who_wait_for_it(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await ended(client, queue, 2 * PAGE, "default")
    info = await plain(client.redis).info("commandstats")
    before = int(info["cmdstat_evalsha"]["calls"])
    read = await asyncio.gather(*(all_of(client, job_id) for _ in range(100)))
    assert all(events == read[0] for events in read) and len(read[0]) == 2 * PAGE + 1
    info = await plain(client.redis).info("commandstats")
    num_groups = PAGES_AT_ONCE + 1  # who came first each on their own, and all others together
    assert int(info["cmdstat_evalsha"]["calls"]) - before <= 3 * num_groups


@with_a_reader()
async def test_one_who_reads_for_others_and_leaves_is_followed_by_another(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await ended(client, queue, 10, "default")
    places = [client._pages._first.place(f"{number}") for number in range(PAGES_AT_ONCE)]
    for place in places:
        await place.__aenter__()
    first, *others = [asyncio.create_task(all_of(client, job_id)) for _ in range(3)]
    await asyncio.sleep(0.1)  # all wait by now
    first.cancel()
    await asyncio.sleep(0)
    for place in places:
        await place.__aexit__(None, None, None)
    assert [len(await each) for each in others] == [11, 11]


@with_a_reader()
async def test_logs_of_one_tenant_that_are_read_again_and_again_delay_no_other(
    client: QueueClient, queue: WorkerQueue
) -> None:
    """Counted in events that the flood got before another's, not in time."""
    many = [await ended(client, queue, 200, "many") for _ in range(20)]
    other = await ended(client, queue, 3, "other")
    num_read = 0

    async def read_again(job_id: str) -> None:
        nonlocal num_read
        while True:
            async for _ in client.stream(job_id, tenant="many"):
                num_read += 1

    flood = [asyncio.create_task(read_again(many[number % 20])) for number in range(300)]
    await asyncio.sleep(0.3)
    waits = []
    for _ in range(5):
        before = num_read
        assert len([event async for event in client.stream(other, tenant="other")]) == 4
        waits.append(num_read - before)
    for task in flood:
        task.cancel()
    await asyncio.wait(flood)
    assert min(waits) < 20 * 200  # of 300 x 200 that wait


@with_a_reader()
async def test_waiting_behind_other_readers_is_no_loss_of_redis(
    client: QueueClient, queue: WorkerQueue
) -> None:
    client._patience._limit_s = 0.05
    job_id = await ended(client, queue, 3, "default")
    places = [client._pages._first.place(f"{number}") for number in range(PAGES_AT_ONCE)]
    for place in places:
        await place.__aenter__()
    reading = asyncio.create_task(all_of(client, job_id))
    await asyncio.sleep(0.3)
    for place in places:
        await place.__aexit__(None, None, None)
    assert len(await reading) == 4


@with_a_reader()
async def test_a_crowd_of_readers_of_one_live_job_hears_all_of_it(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await client.enqueue("x", background=True)
    taken = await started(queue)
    made = deltas(job_id, *[1] * 30)
    reading = [asyncio.create_task(all_of(client, job_id)) for _ in range(300)]
    for delta in made:
        await queue.commit("w", [Commit(job_id, taken.epoch, [delta])])
    await finish(queue, taken, made)
    assert all(read == [*made, done(made)] for read in await asyncio.gather(*reading))


def test_fifty_readers_over_http_that_join_at_random_get_the_same(redis_url: str) -> None:
    async def main(gateway: GatewayProcess) -> None:
        rng = random.Random(50)
        async with (
            queue_at(redis_url) as queue,
            httpx.AsyncClient(base_url=gateway.url, timeout=90) as http,
        ):
            await queue.register("w", WorkerCard())
            asked = {"model": MODEL, "prompt": "x", "background": True}
            job_id = (await http.post("/v1/jobs", json=asked)).json()["id"]
            taken = await started(queue)
            made: list[Delta] = []
            for _ in range(60):
                made.append(continued(job_id, made, 1 + len(made) % 3))
            path, joins = f"/v1/jobs/{job_id}/events", sorted(rng.choices(range(61), k=50))
            readers = list[asyncio.Task[httpx.Response]]()
            for at, delta in enumerate(made):
                while joins and joins[0] <= at:
                    joins.pop(0)
                    readers.append(asyncio.create_task(http.get(path)))
                await queue.commit("w", [Commit(job_id, taken.epoch, [delta])])
                await asyncio.sleep(0.003)
            readers += [asyncio.create_task(http.get(path)) for _ in joins]
            await finish(queue, taken, made)
            texts = {(await reader).text for reader in readers}
            assert len(readers) == 50 and len(texts) == 1
            (text,) = texts
            assert [line for line in text.splitlines() if line.startswith("id: ")] == [
                *(f"id: {delta.id}" for delta in made),
                f"id: {made[-1].id}",
            ]

    with GatewayProcess(redis_url, "--ping-s", "600") as gateway:
        asyncio.run(main(gateway))


def stuck(gateway: GatewayProcess, path: str) -> socket.socket:
    """Asks, and does not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", gateway.port))
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n\r\n".encode())
    return connection


def test_callers_who_do_not_read_cost_the_gateway_no_memory_and_miss_nothing(
    redis_url: str,
) -> None:
    async def main(gateway: GatewayProcess) -> None:
        async with (
            queue_at(redis_url) as queue,
            httpx.AsyncClient(base_url=gateway.url, timeout=90) as http,
        ):
            await queue.register("w", WorkerCard())
            asked = {"model": MODEL, "prompt": "x", "background": True}
            job_id = (await http.post("/v1/jobs", json=asked)).json()["id"]
            taken, path = await started(queue), f"/v1/jobs/{job_id}/events"
            made = [
                Delta(position=at, token_ids=[7], text=f"{at:06d}" + "x" * 2000)
                for at in range(2000)
            ]
            await queue.commit("w", [Commit(job_id, taken.epoch, made[:1])])
            connections = [stuck(gateway, path) for _ in range(20)]
            warm = http.get(path)  # its first pages are what memory is compared with
            reading = asyncio.create_task(warm)
            await queue.commit("w", [Commit(job_id, taken.epoch, made[1:500])])
            before = memory_bytes(gateway.process.pid, "VmRSS")
            for at in range(500, len(made), 250):
                await queue.commit("w", [Commit(job_id, taken.epoch, made[at : at + 250])])
            await finish(queue, taken, made)
            assert (await reading).text.count("\nid: ") == len(made)
            grown = memory_bytes(gateway.process.pid, "VmRSS") - before
            assert grown < 20 << 20, f"{grown >> 20} MiB for 20 callers of 4 MiB each"
            whole = await asyncio.gather(
                *(asyncio.to_thread(read_all, connection) for connection in connections[:5])
            )
            for connection in connections[5:]:
                connection.close()
            assert {text.count(b"xxxx\x22") for text in whole} == {len(made)}

    with GatewayProcess(redis_url) as gateway:
        asyncio.run(main(gateway))


def read_all(connection: socket.socket) -> bytes:
    received = bytearray()
    with connection:
        while piece := connection.recv(1 << 16):
            received += piece
    return bytes(received)

"""The SDK against a scripted worker: what readers get, whatever happens on the way."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager

import pytest

from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.sync_client import SyncClient
from penstock.schemas.delivery import Commit
from penstock.schemas.errors import (
    IdempotencyMismatch,
    InvalidJob,
    JobNotFound,
    ModelNotFound,
    NoWorker,
    PenstockError,
    QueueFull,
    StreamDiverged,
)
from penstock.schemas.event import Delta, Done, Event, Failed
from penstock.schemas.keys import Lane, lane_label
from penstock.schemas.model import ModelCard, WorkerCard
from penstock.schemas.queue.registry import Registry
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.connection import connect
from plain import plain
from scripted import LANE, MODEL, ScriptedWorker, a_job, delta, deltas, finish, queue_at, started


@asynccontextmanager
async def service(
    url: str, num_tokens: int = 12, step_s: float = 0.0
) -> AsyncIterator[tuple[QueueClient, WorkerQueue]]:
    """A client, and a worker that runs its jobs."""
    async with queue_at(url) as queue, queue_at(url) as own, QueueClient.from_url(url) as client:
        await queue.register("w", WorkerCard())
        async with asyncio.TaskGroup() as parts:
            worker = parts.create_task(ScriptedWorker(own, "w", num_tokens, step_s).run())
            yield client, queue
            worker.cancel()


def on_a_service(
    test: Callable[[QueueClient, WorkerQueue], Awaitable[None]],
) -> Callable[[str], None]:
    def run(redis_url: str) -> None:
        async def main() -> None:
            async with service(redis_url) as (client, queue):
                await test(client, queue)

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def with_no_worker(
    test: Callable[[QueueClient, WorkerQueue], Awaitable[None]],
) -> Callable[[str], None]:
    """The test drives the worker `w` itself."""

    def run(redis_url: str) -> None:
        async def main() -> None:
            async with queue_at(redis_url) as queue, QueueClient.from_url(redis_url) as client:
                await queue.register("w", WorkerCard())
                await test(client, queue)

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def read(
    client: QueueClient, job_id: str, cursor: int | str = 0, most: int = 10**9
) -> list[Event]:
    """At most so many events, then the reader leaves."""
    got: list[Event] = []
    async with aclosing(client.stream(job_id, cursor)) as events:
        async for event in events:
            got.append(event)
            if len(got) >= most:
                break
    return got


@contextmanager
def silence(client: QueueClient, seconds: float) -> Iterator[None]:
    """How long a reader hears nothing before it asks the log; long: something else must wake it."""
    before, client._subscription._silence_s = client._subscription._silence_s, seconds
    try:
        yield
    finally:
        client._subscription._silence_s = before


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


@on_a_service
async def test_a_job_streams_to_its_end_and_leaves_a_result(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await client.enqueue("x", temperature=0.5, max_tokens=12)
    events = await read(client, job_id)
    whole = delta(job_id, 0, 12)
    assert (tokens_of(events), text_of(events)) == (whole.token_ids, whole.text)
    assert isinstance(events[-1], Done) and events[-1].position == 12
    result = await client.result(job_id)
    assert result is not None and result.choices[0].text == whole.text
    assert (await client.status(job_id)).num_tokens == 12


@on_a_service
async def test_a_hundred_streams_at_once_each_get_their_own(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_ids = [await client.enqueue("x", messages=None) for _ in range(100)]
    for job_id, events in zip(
        job_ids, await asyncio.gather(*(read(client, job_id) for job_id in job_ids)), strict=True
    ):
        assert text_of(events) == delta(job_id, 0, 12).text
        assert tokens_of(events) == delta(job_id, 0, 12).token_ids


@on_a_service
async def test_a_model_that_was_registered_a_moment_ago_is_found(
    client: QueueClient, queue: WorkerQueue
) -> None:
    """Though the list of models is looked up once a second."""
    assert list(await client.models()) == [MODEL]
    await Registry(client.redis).register(ModelCard(name="later"))
    assert lane_label(await client.name_job("later")) == Lane("later").label
    with pytest.raises(ModelNotFound):
        await client.name_job("never")


@on_a_service
async def test_a_late_reader_gets_the_same_from_the_log_and_from_the_result(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await client.enqueue("x")
    live = await read(client, job_id)
    assert await read(client, job_id) == live
    await plain(client.redis).delete(f"{LANE.job(job_id)}:log")
    assert await read(client, job_id) == live
    for begun in (12, live[-2].id):
        assert await read(client, job_id, begun) == live[-1:]
    for wrong in (13, 99, "12-00000000"):
        with pytest.raises(StreamDiverged):
            await read(client, job_id, wrong)


def tokens_in(events: list[Event]) -> int:
    return sum(len(one.token_ids) for one in events if isinstance(one, Delta))


def test_a_stream_cut_200_times_and_resumed_elsewhere_is_whole(redis_url: str) -> None:
    async def main() -> None:
        rng = random.Random(5)
        async with (
            service(redis_url, num_tokens=600, step_s=0.002) as (client, _),
            QueueClient.from_url(redis_url) as other,
        ):
            job_id = await client.enqueue("x", max_tokens=600)
            got: list[Event] = []
            for _ in range(200):
                cursor: int | str = rng.choice((tokens_in(got), got[-1].id)) if got else 0
                got += await read(rng.choice((client, other)), job_id, cursor, rng.randint(1, 3))
                if not isinstance(got[-1], Delta):
                    break
            got += await read(other, job_id, tokens_in(got))
        whole = delta(job_id, 0, 600)
        assert tokens_of(got) == whole.token_ids
        assert text_of(got).encode() == whole.text.encode()
        assert sum(not isinstance(one, Delta) for one in got) == 1

    asyncio.run(main())


@with_no_worker
async def test_a_cursor_inside_an_event_gets_the_tokens_left_and_the_whole_text(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await client.enqueue("x")
    taken = await started(queue)
    made = deltas(job_id, 3, 4)
    await queue.commit("w", [Commit(job_id, taken.epoch, made[:1])])
    first = asyncio.create_task(read(client, job_id, 1))
    ahead = asyncio.create_task(read(client, job_id, 5))
    await asyncio.sleep(0.05)
    await queue.commit("w", [Commit(job_id, taken.epoch, made[1:])])
    await finish(queue, taken, made)
    events = await first
    assert (tokens_of(events), text_of(events)) == (
        delta(job_id, 1, 6).token_ids,
        made[0].text + made[1].text,
    )
    late = await ahead
    assert (tokens_of(late), text_of(late)) == (delta(job_id, 5, 2).token_ids, made[1].text)
    assert [late[0].position, late[-1].position] == [5, 7]


@with_no_worker
async def test_a_reader_who_missed_messages_gets_them_from_the_log(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await client.enqueue("x")
    taken = await started(queue)
    made = deltas(job_id, *[1] * 6)
    with silence(client, 3600):
        reading = asyncio.create_task(read(client, job_id))
        await asyncio.sleep(0.05)
        await queue.commit("w", [Commit(job_id, taken.epoch, made[:1])])
        channels = await plain(client.redis).hget(LANE.job(job_id), "channels")
        await plain(client.redis).hset(LANE.job(job_id), "channels", "elsewhere")
        await queue.commit("w", [Commit(job_id, taken.epoch, made[1:4])])
        await plain(client.redis).hset(LANE.job(job_id), "channels", channels)
        await queue.commit("w", [Commit(job_id, taken.epoch, made[4:])])
        await finish(queue, taken, made)
        async with asyncio.timeout(100):
            assert (await reading)[:-1] == made


@with_no_worker
async def test_an_end_that_fell_into_a_lost_connection_is_found_at_once(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await client.enqueue("x")
    taken = await started(queue)
    with silence(client, 3600):
        reading = asyncio.create_task(read(client, job_id))
        await asyncio.sleep(0.05)
        await plain(client.redis).execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await finish(queue, taken, deltas(job_id, 2))
        async with asyncio.timeout(100):
            assert text_of(await reading) == deltas(job_id, 2)[0].text


@with_no_worker
async def test_a_long_log_is_read_without_waiting_between_its_pages(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await client.enqueue("x")
    taken = await started(queue)
    made = deltas(job_id, *[1] * 1100)
    await queue.commit("w", [Commit(job_id, taken.epoch, made)])
    with silence(client, 3600):
        async with asyncio.timeout(100):
            assert await read(client, job_id, 0, 1100) == made


@with_no_worker
async def test_a_lost_end_is_found_after_a_silence(client: QueueClient, queue: WorkerQueue) -> None:
    job_id = await client.enqueue("x")
    taken = await started(queue)
    with silence(client, 0.2):
        reading = asyncio.create_task(read(client, job_id))
        await asyncio.sleep(0.05)
        await plain(client.redis).hset(LANE.job(job_id), "channels", "elsewhere")
        await finish(queue, taken, deltas(job_id, 2))
        async with asyncio.timeout(100):
            assert text_of(await reading) == deltas(job_id, 2)[0].text


@with_no_worker
async def test_a_slow_reader_pages_from_the_log_and_holds_up_nobody(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await client.enqueue("x")
    taken = await started(queue)
    made = deltas(job_id, *[1] * 1500)
    async with aclosing(client.stream(job_id)) as events:
        await queue.commit("w", [Commit(job_id, taken.epoch, made[:1])])
        slow = [await anext(events)]
        quick = asyncio.create_task(read(client, job_id))
        for at in range(1, 1500, 50):
            await queue.commit("w", [Commit(job_id, taken.epoch, made[at : at + 50])])
        await finish(queue, taken, made)
        assert (await quick)[:-1] == made
        (readers,) = client._subscription._readers.values()
        assert max(reader.num_unread for reader in readers) <= 256
        slow += [event async for event in events]
    assert slow[:-1] == made


def test_streams_outlive_a_server_that_is_killed_and_comes_back(redis_url: str) -> None:
    async def main(server: Server) -> None:
        async with queue_at(server.url) as queue, QueueClient.from_url(server.url) as client:
            await queue.register("w", WorkerCard())
            job_id = await client.enqueue("x")
            taken = await started(queue)
            made = deltas(job_id, *[1] * 5)
            reading = asyncio.create_task(read(client, job_id))
            await queue.commit("w", [Commit(job_id, taken.epoch, made[:2])])
            server.kill()
            await asyncio.to_thread(server.start)
            await queue.register("w", WorkerCard())
            await queue.commit("w", [Commit(job_id, taken.epoch, made[2:])])
            assert await finish(queue, taken, made)
            async with asyncio.timeout(100):
                assert (await reading)[:-1] == made

    # Else a kill takes what was to be written while a sync of the disk is under way.
    with Server(options={"appendfsync": "always"}) as server:
        asyncio.run(main(server))


@with_no_worker
async def test_a_lost_subscriber_connection_is_a_pause_and_no_more(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await client.enqueue("x")
    taken = await started(queue)
    made = deltas(job_id, *[1] * 40)
    reading = asyncio.create_task(read(client, job_id))
    for at in range(40):
        await queue.commit("w", [Commit(job_id, taken.epoch, made[at : at + 1])])
        if at % 8 == 3:
            await plain(client.redis).execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await asyncio.sleep(0.01)
    await finish(queue, taken, made)
    async with asyncio.timeout(100):
        assert (await reading)[:-1] == made


@with_no_worker
async def test_a_reader_that_leaves_is_taken_from_the_job(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await client.enqueue("x", background=True)
    taken = await started(queue)
    await queue.commit("w", [Commit(job_id, taken.epoch, deltas(job_id, 1, 1))])
    inbox = LANE.inbox(client.name).encode()
    async with aclosing(client.stream(job_id)) as events:
        await anext(events)
        assert inbox in (await plain(client.redis).hget(LANE.job(job_id), "channels")).split(b"\n")
    assert inbox not in (await plain(client.redis).hget(LANE.job(job_id), "channels")).split(b"\n")
    assert client._subscription._readers == {}


@with_no_worker
async def test_a_cancelled_job_tells_its_readers(client: QueueClient, queue: WorkerQueue) -> None:
    job_id = await client.enqueue("x")
    reading = asyncio.create_task(read(client, job_id))
    await asyncio.sleep(0.05)
    assert (await client.cancel(job_id)).state == "cancelled"
    (end,) = await reading
    assert isinstance(end, Failed) and (end.state, end.error.status) == ("cancelled", 499)
    result = await client.result(job_id)
    assert result is not None and result.state == "cancelled"


@on_a_service
async def test_fifty_identical_submissions_are_one_job(
    client: QueueClient, queue: WorkerQueue
) -> None:
    calls = (client.enqueue("x", idempotency_key="k", seed=4) for _ in range(50))
    job_ids = await asyncio.gather(*calls)
    assert len(set(job_ids)) == 1
    streams = await asyncio.gather(*(read(client, job_ids[0]) for _ in range(50)))
    assert all(events == streams[0] for events in streams)
    assert (await queue.counts()).num_ended == 1
    with pytest.raises(IdempotencyMismatch):
        await client.enqueue("y", idempotency_key="k", seed=4)
    other = await client.enqueue("y", idempotency_key="k", tenant="another")
    assert other != job_ids[0]


@with_no_worker
async def test_what_cannot_be_taken_is_refused_with_its_reason(
    client: QueueClient, queue: WorkerQueue
) -> None:
    async def refusal(**asked: object) -> PenstockError:
        with pytest.raises(PenstockError) as caught:
            await client.enqueue(**asked)
        return caught.value

    assert isinstance(await refusal(prompt="x", model="huge"), ModelNotFound)
    for field, asked in {
        "temperature": {"prompt": "x", "temperature": 3.0},
        "max_tokens": {"prompt": "x", "max_tokens": "many"},
        "warmth": {"prompt": "x", "warmth": 1},
        "prompts": {"prompt": ""},
        "timeout_ms": {"prompt": "x", "timeout_ms": 0},
        "best_of": {"prompt": "x", "n": 3, "best_of": 2},
        "n=16 x 32768 tokens": {"prompt": ["x"] * 5, "n": 16, "max_tokens": None, "logprobs": 0},
    }.items():
        error = await refusal(**asked)
        assert isinstance(error, InvalidJob) and field in error.message
    assert isinstance(await refusal(), InvalidJob)
    client.max_queued = 1
    await client.enqueue("x")
    full = await refusal(prompt="x")
    assert isinstance(full, QueueFull) and full.retry_after_ms
    await queue.unregister("w")
    assert isinstance(await refusal(prompt="x"), NoWorker)
    client.max_queued = 2
    await client.enqueue("x", background=True)
    with pytest.raises(InvalidJob):
        await read(client, LANE.new_job_id(), -1)


@with_no_worker
async def test_unknown_and_foreign_jobs_are_not_found(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await client.enqueue("x", tenant="mine")
    for unknown in (job_id, "job_zzzzzz0_" + "a" * 26, "nonsense", LANE.new_job_id()):
        for ask in (client.status, client.result, client.cancel, client.delete):
            with pytest.raises(JobNotFound):
                await ask(unknown)
        with pytest.raises(JobNotFound):
            await read(client, unknown)
    assert (await client.status(job_id, tenant="mine")).state == "ready"
    await client.delete(job_id, tenant="mine")
    with pytest.raises(JobNotFound):
        await client.status(job_id, tenant="mine")


@with_no_worker
async def test_jobs_of_a_model_with_many_lanes_are_found_by_their_ids(
    client: QueueClient, queue: WorkerQueue
) -> None:
    await Registry(client.redis).register(ModelCard(name="wide", lanes=4))
    client._lanes._cards_until = 0
    for wide in [one for one in await client.queues() if one.lane.model == "wide"]:
        await WorkerQueue(client.redis, wide.lane).register("w", WorkerCard())
    job_ids = [await client.enqueue("x", model="wide") for _ in range(32)]
    assert len({job_id.split("_")[1] for job_id in job_ids}) > 1
    for job_id in job_ids:
        assert (await client.status(job_id)).model == "wide"
    keys = [await client.enqueue("x", model="wide", idempotency_key="k") for _ in range(2)]
    assert keys[0] == keys[1]


def test_the_same_without_an_event_loop(redis_url: str) -> None:
    async def work(ready: asyncio.Event) -> None:
        async with service(redis_url):
            ready.set()
            await asyncio.to_thread(ask)

    def ask() -> None:
        with SyncClient.from_url(redis_url) as client:
            job_id = client.enqueue("x", model=MODEL, max_tokens=12)
            assert text_of(list(client.stream(job_id))) == delta(job_id, 0, 12).text
            for event in client.stream(job_id, 3):
                assert event.position == 3
                break
            result = client.result(job_id)
            assert result is not None and result.choices[0].text == delta(job_id, 0, 12).text
            assert client.models()[MODEL].name == MODEL
            with pytest.raises(JobNotFound):
                client.status("nothing")

    asyncio.run(work(asyncio.Event()))


def test_a_job_submitted_by_hand_is_the_same_job(redis_url: str) -> None:
    async def main() -> None:
        async with service(redis_url) as (client, _):
            job = a_job(job_id=await client.name_job(MODEL, "key"))
            await client.submit(job)
            await client.submit(
                job.model_copy(update={"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"})
            )
            assert len(await read(client, job.job_id)) == 13

    asyncio.run(main())


@with_no_worker
async def test_a_trace_goes_with_the_job_and_is_no_part_of_what_was_asked(
    client: QueueClient, queue: WorkerQueue
) -> None:
    first, second = (f"00-{letter * 32}-{letter * 16}-01" for letter in "ab")
    for trace in (first, second):
        await client.enqueue("x", background=True, idempotency_key="one", traceparent=trace)
    taken = await started(queue)
    assert taken.job.traceparent == first
    await queue.release("w", [taken.job.job_id])
    assert (await started(queue)).job.traceparent == first
    for wrong in ("", "00-1", f'"{first}', first.upper(), f"{first}\n", "x" * 10_000_000):
        with pytest.raises(InvalidJob) as refusal:
            await client.enqueue("x", background=True, traceparent=wrong)
        assert refusal.value.param == "traceparent"
        assert len(refusal.value.message) < 500


@with_no_worker
async def test_a_stranger_on_the_channel_disturbs_nobody(
    client: QueueClient, queue: WorkerQueue
) -> None:
    job_id = await client.enqueue("x")
    taken = await started(queue)
    made = deltas(job_id, 1, 1)
    with silence(client, 3600):
        reading = asyncio.create_task(read(client, job_id))
        await asyncio.sleep(0.05)
        before = await subscribers(client)
        for noise in (b"", b"\xff\n{", b'{"job_id":"%s","event":{"type":"?"}}' % job_id.encode()):
            await plain(client.redis).publish(LANE.inbox(client.name), noise)
        await queue.commit("w", [Commit(job_id, taken.epoch, made)])
        await finish(queue, taken, made)
        async with asyncio.timeout(100):
            assert (await reading)[:-1] == made
        assert await subscribers(client) == before


async def subscribers(client: QueueClient) -> set[str]:
    """Connections that hear of what is published."""
    return {each["id"] for each in await plain(client.redis).client_list("pubsub")}


@with_no_worker
async def test_a_cancelled_call_stays_cancelled(client: QueueClient, queue: WorkerQueue) -> None:
    async def ask_for_ever() -> None:
        while True:
            await queue.counts()

    for turns in range(200):
        task = asyncio.create_task(ask_for_ever())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=30)
        assert task.cancelled()


def test_a_model_that_was_just_registered_is_known_at_once(redis_url: str) -> None:
    """By a client that knew better a moment ago: another gateway may list it already."""

    async def main() -> None:
        async with QueueClient.from_url(redis_url) as client, connect(redis_url) as redis:
            for name in ("one", "two"):
                assert name not in await client.models()
                await Registry(redis).register(ModelCard(name=name))
                await client.name_job(name)

    asyncio.run(main())

"""A worker that does not move, or that lost its lease, stops writing and is begun anew."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest
import redis

from penstock.gateway.queue_client import QueueClient
from penstock.schemas.keys import Lane
from penstock.schemas.model import WorkerCard
from penstock.schemas.params.sampling import SamplingParams
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.connection import connect
from penstock.worker.engine.fake import fake_engine
from penstock.worker.engine.io.messages import Output
from penstock.worker.jobs.active_job import ActiveJob
from penstock.worker.jobs.capacity import Capacity
from penstock.worker.jobs.consumer import Intake
from penstock.worker.jobs.lease_clock import LeaseClock
from penstock.worker.jobs.streamer import Streamer
from penstock.worker.process.sampling_defaults import Generation
from penstock.worker.process.settings import WorkerSettings
from penstock.worker.text.model_tokenizer import load_tokenizer
from scripted import LANE, MODEL, a_job, started
from worker_process import WorkerProcess, ask, incarnations, same, until

STORY = SamplingParams(max_tokens=200, seed=6, ignore_eos=True)
WITHIN_S = 100  # several of what it takes on a busy machine
FLAGS = ("--step-timeout-s", "3", "--fake-step-ms", "20", "--fake-poison", "poison")


def crashes(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.hget(f"{Lane('fake').prefix}counts", "crashed") or 0)


async def tokens(client: QueueClient, job_id: str, least: int) -> None:
    while (await client.status(job_id)).num_tokens < least:
        await asyncio.sleep(0.02)


@pytest.mark.slow
def test_a_wedged_io_process_is_ended_and_its_jobs_go_on(redis_url, offline):
    """The engine lives, and so does the supervisor; the crash is told to the queue."""
    with WorkerProcess(redis_url, "fake", *FLAGS) as worker:
        worker.ready()
        [name] = incarnations(redis_url)

        async def asks(client: QueueClient) -> None:
            job_id = await client.enqueue("long", params=STORY, background=True)
            await tokens(client, job_id, 20)
            os.kill(worker.child("penstock.worker.jobs.service"), signal.SIGSTOP)
            same(await client.result(job_id), offline.generate("long", STORY)[0])

        ask(redis_url, asks, WITHIN_S)
        assert "I/O process did not move" in worker.logged()
        assert name not in incarnations(redis_url) and crashes(redis_url) >= 1


@pytest.mark.slow
def test_a_frozen_io_process_loses_its_jobs_with_its_lease(redis_url, offline):
    """Its supervisor lives, and its engine; long before a step would be found too long."""
    flags = ("--fake-step-ms", "20", "--lease-ttl-ms", "1500", "--step-timeout-s", "600")
    with WorkerProcess(redis_url, "fake", *flags) as worker:
        worker.ready()

        async def asks(client: QueueClient) -> None:
            job_id = await client.enqueue("long", params=STORY, background=True)
            await tokens(client, job_id, 20)
            os.kill(worker.child("penstock.worker.jobs.service"), signal.SIGSTOP)
            with WorkerProcess(redis_url, "fake", *flags) as other:
                other.ready()
                same(await client.result(job_id), offline.generate("long", STORY)[0])
            os.kill(worker.child("penstock.worker.jobs.service"), signal.SIGCONT)
            same(
                await client.result(await client.enqueue("more", params=STORY)),
                offline.generate("more", STORY)[0],
            )

        ask(redis_url, asks, WITHIN_S)
        assert crashes(redis_url) == 0 and "lost its lease and dropped" in worker.logged()


@pytest.mark.slow
def test_an_engine_whose_steps_compute_nothing_is_ended(redis_url, offline):
    """Each step returns; its pulse goes on; and yet nothing comes of it."""
    with WorkerProcess(redis_url, "fake", *FLAGS) as worker:
        worker.ready()

        async def asks(client: QueueClient) -> None:
            bad = await client.enqueue("poison:idle:30", params=STORY, background=True)
            good = await client.enqueue("long", params=STORY, background=True)
            await tokens(client, good, 20)
            while crashes(redis_url) == 0:
                await asyncio.sleep(0.05)
            await client.cancel(bad)
            same(await client.result(good), offline.generate("long", STORY)[0])

        ask(redis_url, asks, WITHIN_S)
        assert "engine did not move" in worker.logged()


@contextlib.asynccontextmanager
async def at_work(url: str, lease: LeaseClock) -> AsyncIterator[tuple[Streamer, ActiveJob]]:
    """A streamer that nobody runs yet, with one job."""
    settings = WorkerSettings(model=MODEL, load_format="fake")
    limits = fake_engine(512, 8, 16, 0).limits
    intake = Intake(settings, load_tokenizer(settings), limits, Generation({}))
    async with connect(url) as server:
        queue = WorkerQueue(server, LANE, lease_ms=60_000)
        await queue.register("w", WorkerCard())
        await queue.enqueue(a_job(background=True), None)
        active = await intake.prepare(await started(queue))
        streamer = Streamer(queue, "w", lease, Capacity(limits, 1), lambda orders: None)
        streamer.admit(active, intake.additions(active))
        yield streamer, active


def test_nothing_is_written_past_the_lease(redis_url):
    """By the worker's own clock: the queue, which nobody reaped, would still take it."""

    async def main() -> None:
        lease = LeaseClock(60)
        async with at_work(redis_url, lease) as (streamer, active):
            lease.until_s = time.monotonic() - 1
            running = asyncio.create_task(streamer.run())
            streamer.take([Output(active.seq_id(0), [65])])
            await asyncio.sleep(0.3)
            assert (await streamer.queue.status("default", active.job.job_id)).num_tokens == 0
            lease.renew(time.monotonic())
            async with asyncio.timeout(30):
                while not (await streamer.queue.status("default", active.job.job_id)).num_tokens:
                    await asyncio.sleep(0.01)
            running.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("is_last", [False, True], ids=["a commit", "an end"])
def test_a_write_for_a_job_that_is_gone_is_counted_and_its_end_is_not(redis_url, is_last):
    async def main() -> None:
        async with at_work(redis_url, LeaseClock(60)) as (streamer, active):
            counts, of_model = streamer._counts, streamer._counts.of(LANE.model)
            before = of_model.dump()
            await streamer.queue.release("w", [active.job.job_id])  # as another's reaper would
            running = asyncio.create_task(streamer.run())
            reason = "length" if is_last else None
            streamer.take([Output(active.seq_id(0), [65], finish_reason=reason)])
            async with asyncio.timeout(30):
                while streamer.jobs:
                    await asyncio.sleep(0.01)
            running.cancel()
            assert counts.dump()["fenced_writes"] == 1
            assert of_model.dump() == before

    asyncio.run(main())


@pytest.mark.parametrize("is_run", [True, False], ids=["while it commits", "after its last commit"])
def test_what_was_made_of_a_job_is_logged_before_it_is_handed_back(redis_url, is_run):
    async def main() -> None:
        async with at_work(redis_url, LeaseClock(60)) as (streamer, active):
            running = asyncio.create_task(streamer.run())
            streamer.take([Output(active.seq_id(0), [65])])
            if is_run:
                await asyncio.sleep(0)  # the commit is under way
                streamer.take([Output(active.seq_id(0), [66])])
            else:
                running.cancel()
            await streamer.hand_back(streamer.stop_all())
            status = await streamer.queue.status("default", active.job.job_id)
            assert (status.state, status.num_tokens) == ("ready", 1 + is_run)
            assert not streamer.jobs
            running.cancel()

    asyncio.run(main())


@pytest.mark.slow
def test_a_supervisor_that_was_frozen_does_not_renew_what_ran_out(redis_url, offline):
    """Nobody reaped its lease, so the queue would renew it; the worker itself takes a new name."""
    with WorkerProcess(redis_url, "fake", *FLAGS, "--lease-ttl-ms", "1500") as worker:
        worker.ready()
        [name] = incarnations(redis_url)

        async def asks(client: QueueClient) -> None:
            job_id = await client.enqueue("long", params=STORY, background=True)
            await tokens(client, job_id, 20)
            worker.signal_all(signal.SIGSTOP)
            await asyncio.sleep(2)
            worker.process.send_signal(signal.SIGCONT)  # alone: its I/O process would reap it
            await asyncio.to_thread(until, is_dropped, "the lease to be given up", 60)
            worker.signal_all(signal.SIGCONT)
            same(await client.result(job_id), offline.generate("long", STORY)[0])

        def is_dropped() -> bool:
            return "lost its lease and dropped" in worker.logged()

        ask(redis_url, asks)
        until(lambda: incarnations(redis_url) not in ({name}, set()), "a new name")
        assert "lost its lease and dropped" in worker.logged()


@pytest.mark.slow
@pytest.mark.parametrize("lease_ms", [1500, 60_000], ids=["past", "within"])
def test_a_worker_whose_machine_stood_still_is_not_ended(redis_url, offline, lease_ms):
    """In the midst of steps, for longer than one may take; its supervisor is awake first."""
    with WorkerProcess(redis_url, "fake", *FLAGS, "--lease-ttl-ms", f"{lease_ms}") as worker:
        worker.ready()
        [name], engine = incarnations(redis_url), worker.child("penstock.worker.engine_process")

        async def asks(client: QueueClient) -> None:
            job_id = await client.enqueue("long", params=STORY, background=True)
            await tokens(client, job_id, 20)
            worker.signal_all(signal.SIGSTOP)
            await asyncio.sleep(7)
            worker.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(1)
            worker.signal_all(signal.SIGCONT)
            same(await client.result(job_id), offline.generate("long", STORY)[0])

        ask(redis_url, asks)
        assert worker.child("penstock.worker.engine_process") == engine
        assert "did not move" not in worker.logged() and crashes(redis_url) == 0
        assert (name in incarnations(redis_url)) == (lease_ms == 60_000)


@pytest.mark.slow
def test_a_frozen_engine_loses_its_jobs_with_its_lease_and_is_kept(redis_url, offline):
    """Long before a step would be found too long: the system says that it is stopped."""
    flags = ("--fake-step-ms", "20", "--lease-ttl-ms", "1500", "--step-timeout-s", "600")
    with WorkerProcess(redis_url, "fake", *flags) as worker:
        worker.ready()
        engine = worker.child("penstock.worker.engine_process")

        async def asks(client: QueueClient) -> None:
            job_id = await client.enqueue("long", params=STORY, background=True)
            await tokens(client, job_id, 20)
            os.kill(engine, signal.SIGSTOP)
            with WorkerProcess(redis_url, "fake", *flags) as other:
                other.ready()
                same(await client.result(job_id), offline.generate("long", STORY)[0])
            os.kill(engine, signal.SIGCONT)
            same(
                await client.result(await client.enqueue("more", params=STORY)),
                offline.generate("more", STORY)[0],
            )

        ask(redis_url, asks, WITHIN_S)
        assert worker.child("penstock.worker.engine_process") == engine
        assert crashes(redis_url) == 0 and "lost its lease and dropped" in worker.logged()

"""However a worker ends, its jobs go on elsewhere, and their readers see one whole text."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.event import Delta, Result
from penstock.schemas.job import Job
from penstock.schemas.keys import Lane
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.llm import LLM, RequestOutput
from plain import plain
from worker_process import WorkerProcess, ask, incarnations, same, until

LONG = "and so it went on"


STORY = SamplingParams(max_tokens=300, seed=6, ignore_eos=True, n=2, stop=["never there"])
SLOW = ("--fake-step-ms", "10")


def told(offline: LLM) -> RequestOutput:
    return offline.generate(LONG, STORY)[0]


async def read_while(client: QueueClient, job_id: str, act: Callable[[], None]) -> Result | None:
    """Read a job's whole stream, with `act` after its fortieth token; no gap, no repeat."""
    position, acted = 0, False
    async for event in client.stream(job_id):
        assert event.position == position
        if isinstance(event, Delta):
            position = event.end
        if position >= 40 and not acted:
            acted = True
            await asyncio.to_thread(act)
    assert acted
    return await client.result(job_id)


@pytest.mark.slow
def test_sigterm_hands_running_jobs_to_another_worker(spare, offline):
    """And the text is whole, equal to the undisturbed one; the exit status is 0."""
    with WorkerProcess(spare.url, "fake", "--drain-s", "0.1", "--fake-step-ms", "150") as first:
        first.ready()
        with WorkerProcess(spare.url, "fake") as second:

            async def asks(client: QueueClient) -> None:
                job_id = await client.enqueue(LONG, params=STORY)

                def act() -> None:
                    second.ready()
                    assert first.stop() == 0
                    assert "handed back 1 jobs" in first.logged()

                same(await read_while(client, job_id, act), told(offline))
                assert len(incarnations(spare.url)) == 1

            ask(spare.url, asks)


def test_a_drained_worker_finishes_what_it_has_and_takes_nothing_new(spare, offline):
    with WorkerProcess(spare.url, "fake", "--drain-s", "30", *SLOW) as worker:
        worker.ready()

        async def asks(client: QueueClient) -> None:
            job_id = await client.enqueue(LONG, params=STORY)
            later = await client.name_job("fake")

            def act() -> None:
                worker.process.send_signal(signal.SIGTERM)
                until(lambda: "began to drain" in worker.logged(), "the drain to begin")
                asyncio.run(submit(spare.url, later))

            same(await read_while(client, job_id, act), told(offline))
            await asyncio.to_thread(worker.process.wait, 30)
            assert worker.process.returncode == 0
            status = await client.status(later)
            assert (status.state, status.started_ms) == ("ready", None)

        ask(spare.url, asks)


def test_a_draining_worker_that_loses_its_lease_takes_nothing_up_again(spare):
    with WorkerProcess(spare.url, "fake", "--drain-s", "600", *SLOW) as worker:
        worker.ready()
        [name] = incarnations(spare.url)

        async def asks(client: QueueClient) -> None:
            job_id = await client.enqueue(LONG, max_tokens=8000, ignore_eos=True, background=True)
            while (await client.status(job_id)).state != "decoding":
                await asyncio.sleep(0.01)
            worker.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(until, lambda: "began to drain" in worker.logged(), "the drain")
            io = worker.child("penstock.worker.jobs.service")
            os.kill(io, signal.SIGSTOP)  # else it may find its jobs gone first, and be done
            await plain(client.redis).zrem(f"{Lane('fake').prefix}workers", name)
            await asyncio.to_thread(until, lambda: "lost its lease" in worker.logged(), "the loss")
            os.kill(io, signal.SIGCONT)
            assert await asyncio.to_thread(worker.process.wait, 40) == 0
            assert worker.logged().count(" started serving ") == 1

        ask(spare.url, asks)


async def submit(url: str, job_id: str) -> None:
    job = Job(job_id=job_id, model="fake", prompts=["short"], background=True)
    async with QueueClient.from_url(url) as client:
        await client.submit(job)


def test_a_second_sigterm_hands_back_at_once(spare, offline):
    with WorkerProcess(spare.url, "fake", "--drain-s", "600", "--fake-step-ms", "150") as first:
        first.ready()

        async def asks(client: QueueClient) -> None:
            job_id = await client.enqueue(LONG, params=STORY, background=True)

            def act() -> None:
                first.process.send_signal(signal.SIGTERM)
                until(lambda: "began to drain" in first.logged(), "the drain to begin")
                assert first.stop() == 0
                assert "handed back 1 jobs" in first.logged()

            with WorkerProcess(spare.url, "fake") as second:
                second.ready()
                same(await read_while(client, job_id, act), told(offline))

        ask(spare.url, asks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["penstock.worker.jobs.service", "penstock.worker.engine_process"]
)
def test_a_process_that_dies_is_started_again_and_goes_on(spare, offline, module):
    """At once: it does not take its silence."""
    with WorkerProcess(spare.url, "fake", "--step-timeout-s", "600", *SLOW) as worker:
        worker.ready()

        async def asks(client: QueueClient) -> None:
            job_id = await client.enqueue(LONG, params=STORY, background=True)
            act = lambda: os.kill(worker.child(module), signal.SIGKILL)  # noqa: E731
            same(await read_while(client, job_id, act), told(offline))

        ask(spare.url, asks)


@pytest.mark.slow
def test_the_children_end_with_their_supervisor(spare, offline):
    with WorkerProcess(spare.url, "fake", *SLOW) as first:
        first.ready()
        children = [
            first.child(module)
            for module in ("penstock.worker.jobs.service", "penstock.worker.engine_process")
        ]

        async def asks(client: QueueClient) -> None:
            job_id = await client.enqueue(LONG, params=STORY, background=True)

            def act() -> None:
                os.kill(children[0], signal.SIGSTOP)  # hung: it cannot end by itself
                os.kill(first.process.pid, signal.SIGKILL)

            with WorkerProcess(spare.url, "fake"):
                same(await read_while(client, job_id, act), told(offline))

        ask(spare.url, asks)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "them to end")


@pytest.mark.slow
def test_a_frozen_worker_loses_its_jobs_and_comes_back_under_a_new_name(spare, offline):
    with WorkerProcess(spare.url, "fake", *SLOW) as first:
        first.ready()

        async def asks(client: QueueClient) -> None:
            job_id = await client.enqueue(LONG, params=STORY, background=True)
            [name] = incarnations(spare.url)

            def act() -> None:
                first.signal_all(signal.SIGSTOP)
                second.ready()
                until(lambda: name not in incarnations(spare.url), "its lease to lapse")
                first.signal_all(signal.SIGCONT)

            with WorkerProcess(spare.url, "fake") as second:
                same(await read_while(client, job_id, act), told(offline))
                until(lambda: len(incarnations(spare.url)) == 2, "the first to come back")
                assert name not in incarnations(spare.url)

        ask(spare.url, asks)


@pytest.mark.slow
def test_a_wedged_engine_is_ended_and_its_jobs_go_on(spare, offline):
    with WorkerProcess(spare.url, "fake", "--step-timeout-s", "3", *SLOW) as worker:
        worker.ready()

        async def asks(client: QueueClient) -> None:
            job_id = await client.enqueue(LONG, params=STORY, background=True)
            act = lambda: os.kill(worker.child("penstock.worker.engine_process"), signal.SIGSTOP)  # noqa: E731
            same(await read_while(client, job_id, act), told(offline))
            assert "engine did not move" in worker.logged()

        ask(spare.url, asks)


def test_redis_may_be_absent_at_the_start_and_away_in_between(tmp_path, offline):
    server = Server(folder=tmp_path / "redis").start()
    url = server.url
    server.stop()
    with WorkerProcess(url, "fake", "--lease-ttl-ms", "20000") as worker:
        until(lambda: "Redis could not be reached, trying again" in worker.logged(), "a clear line")
        server.start()
        try:
            worker.ready()

            async def asks(client: QueueClient) -> None:
                job_id = await client.enqueue(LONG, params=STORY, background=True)

                def act() -> None:
                    server.stop()
                    until(lambda: "engine was paused" in worker.logged(), "the engine to pause")
                    server.start()

                same(await read_while(client, job_id, act), told(offline))

            ask(url, asks)
        finally:
            server.stop()


def test_several_names_and_lanes_and_one_process(spare, offline):
    flags = ("--served-model-name", "alpha,beta", "--num-lanes", "3", "--in-process")
    with WorkerProcess(spare.url, "fake", *flags) as worker:
        worker.ready()

        async def asks(client: QueueClient) -> None:
            jobs = [
                await client.enqueue(LONG, model=name, params=STORY)
                for name in ("alpha", "beta") * 6
            ]
            for job_id in jobs:
                same(await client.result(job_id), told(offline))
            used = {job_id.split("_")[1] for job_id in jobs}
            assert len(used) > 2

        ask(spare.url, asks)
        assert worker.stop() == 0


def test_a_lane_with_many_jobs_leaves_turns_to_another(spare):
    flags = ("--served-model-name", "alpha,beta", "--max-num-seqs", "1", "--in-process")
    with WorkerProcess(spare.url, "fake", *flags, "--fake-step-ms", "5") as worker:
        worker.ready()

        async def asks(client: QueueClient) -> None:
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            many = [
                await client.enqueue("x", model="alpha", params=params, background=True)
                for _ in range(20)
            ]
            while (await client.status(many[0])).ended_ms is None:
                await asyncio.sleep(0.01)
            other = await client.enqueue("x", model="beta", params=params)
            await client.result(other)
            states = [(await client.status(job_id)).state for job_id in many]
            assert states.count("succeeded") < 10, "it has its turn, not what they leave"

        ask(spare.url, asks)

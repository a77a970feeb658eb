"""Of one account and class the job goes first that is due first; that is worth something."""

import random
from dataclasses import dataclass

import pytest

from penstock.schemas.delivery import Outcome
from penstock.schemas.job import Job
from penstock.schemas.queue.worker_queue import WorkerQueue
from scripted import a_job, on_a_lane
from stepped import SteppedWorker

STEP_MS = 2000  # by which deadlines differ, of which a real step is a small part
FAR_MS = 60_000  # no job's time is up while the test runs


@dataclass(frozen=True, slots=True)
class Arrival:
    """All in steps of the worker."""

    at: int
    length: int
    deadline: int


def trace(seed: int) -> list[Arrival]:
    """80 jobs in bursts, about as many as four slots can do; some are urgent, most can wait."""
    chance, arrivals, at = random.Random(seed), list[Arrival](), 0
    while len(arrivals) < 80:
        for _ in range(chance.randint(1, 12)):
            length, slack = chance.randint(1, 8), chance.choice((6, 12, 60, 90))
            arrivals.append(Arrival(at, length, at + length + slack))
        at += chance.randint(2, 12)
    return arrivals


async def num_met(queue: WorkerQueue, arrivals: list[Arrival], is_told: bool) -> int:
    """Deadlines that were met, where the queue was told of them, or was not."""
    worker, coming, deadlines, step = SteppedWorker(queue, 4), list(arrivals), dict[str, int](), 0
    ended: dict[str, int] = {}
    while len(ended) < len(arrivals):
        while coming and coming[0].at <= step:
            arrival = coming.pop(0)
            timeout_ms = FAR_MS + STEP_MS * arrival.deadline if is_told else None
            job = as_job(arrival, timeout_ms)
            assert (await queue.enqueue(job, None, "d")).outcome is Outcome.ACCEPTED
            deadlines[job.job_id] = arrival.deadline
        await worker.step()
        step += 1
        assert step < 1000
        ended |= {job.job_id: step for job in worker.ended if job.job_id not in ended}
    return sum(ended[job_id] <= deadline for job_id, deadline in deadlines.items())


def as_job(arrival: Arrival, timeout_ms: int | None) -> Job:
    params = {"max_tokens": arrival.length}
    return a_job(background=True, params=params, timeout_ms=timeout_ms)


@pytest.mark.slow
@on_a_lane
async def test_more_deadlines_are_met_than_first_come_first_served(queue: WorkerQueue) -> None:
    met = [
        [await num_met(queue, trace(seed), is_told) for is_told in (True, False)]
        for seed in range(3)
    ]
    assert all(due_first > came_first for due_first, came_first in met)
    assert sum(due_first - came_first for due_first, came_first in met) >= 30

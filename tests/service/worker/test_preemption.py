"""A full worker takes up a job of a higher class, and who gives way says the same in the end."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.gateway.queue_client import QueueClient
from penstock.schemas.event import Delta
from penstock.schemas.params.sampling import SamplingParams
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.messages import AddSequence, BatchLoad, Load, Output
from penstock.worker.jobs.capacity import Capacity, ReadRequest
from penstock.worker.llm import LLM
from penstock.worker.process.ipc import Step
from scripted import a_job, finish, on_a_lane, started
from worker_process import WorkerProcess, ask, same

HIGH, NORMAL, BATCH = 0, 1, 2
LIMITS = EngineLimits(
    100, 256, num_blocks=1000, block_size=16, max_num_seqs=2, eos_token_ids=frozenset()
)


def room_with(*priorities: int, threshold: int | None = 1) -> Capacity:
    """With sequences `0`, `1` ... that gave a token each."""
    capacity = Capacity(LIMITS, 1, threshold)
    names = [str(number) for number in range(len(priorities))]
    enter(capacity, zip(names, priorities, strict=True))
    tell(capacity, names)
    return capacity


def enter(capacity: Capacity, seqs: Iterable[tuple[str, int]]) -> None:
    params = SamplingParams(max_tokens=8)
    capacity.enter([AddSequence(name, [1], params, priority=priority) for name, priority in seqs])


def tell(capacity: Capacity, names: list[str], num_waiting: int = 0) -> None:
    capacity.note(Step([Output(name, [1]) for name in names], Load(len(names), num_waiting)))


TEXTS = ReadRequest(16, "text")  # that need no room


async def asked(capacity: Capacity) -> ReadRequest | None:
    """What it would read now; none: it waits."""
    try:
        async with asyncio.timeout(0.05):
            return await capacity.wait(object())
    except TimeoutError:
        return None


@pytest.mark.parametrize(
    "priorities, threshold, expected",
    [
        ((BATCH,), 1, ReadRequest(1)),  # there is room
        ((BATCH, BATCH), None, TEXTS),
        ((BATCH, BATCH), 1, ReadRequest(1, "normal")),
        ((BATCH, BATCH), 2, ReadRequest(1, "high")),
        ((HIGH, NORMAL), 1, ReadRequest(1, "high")),
        ((HIGH, NORMAL), 2, TEXTS),
        ((HIGH, HIGH), 1, TEXTS),
    ],
)
def test_a_full_room_asks_for_whom_others_would_give_way_to(priorities, threshold, expected):
    assert asyncio.run(asked(room_with(*priorities, threshold=threshold))) == expected


async def asked_beside(batch: BatchLoad, num_held: int, *priorities: int) -> ReadRequest | None:
    """What is read beside sequences of these classes, where the engine tells of its batch."""
    capacity = Capacity(replace(LIMITS, max_num_seqs=8), 1)
    names = [str(number) for number in range(len(priorities))]
    enter(capacity, zip(names, priorities, strict=True))
    capacity.note(Step([Output(name, [1]) for name in names], Load(num_held, 0, batch)))
    return await asked(capacity)


@pytest.mark.parametrize(
    ("batch", "num_held", "priorities", "expected"),
    [
        (BatchLoad(0, 0, 8), 0, (), ReadRequest(8, batch=8)),
        (BatchLoad(0, 0, 3), 2, (NORMAL, NORMAL), ReadRequest(6, batch=3)),
        (BatchLoad(4, 0, 3), 6, (NORMAL, NORMAL, BATCH, BATCH), ReadRequest(6, batch=1)),
        (BatchLoad(4, 1, 3), 6, (NORMAL, NORMAL, BATCH, BATCH), ReadRequest(6, batch=0)),
        (BatchLoad(999, 0, 3), 1000, (NORMAL, *[BATCH] * 7), ReadRequest(7, batch=0)),  # all pause
        (BatchLoad(999, 0, 8), 999, (BATCH,), ReadRequest(8, batch=0)),
        (BatchLoad(0, 0, 3), 1000, (NORMAL, NORMAL), TEXTS),
        (BatchLoad(0, 0, 3), 8, (NORMAL,) * 8, TEXTS),
    ],
)
def test_what_a_batch_has_is_free_for_others(batch, num_held, priorities, expected):
    ask = asyncio.run(asked_beside(batch, num_held, *priorities))
    assert ask is not None and replace(ask, held_rows={}) == expected


def test_what_is_being_read_of_a_batch_is_counted():
    async def scenario() -> None:
        capacity = Capacity(LIMITS, 1)
        capacity.note(Step([], Load(0, 0, BatchLoad(0, 0, 2))))
        first = await capacity.wait("lane")
        assert first == ReadRequest(2, batch=2)
        assert await asked(capacity) == TEXTS  # what is on its way may be of any class
        capacity.note_read(None, TEXTS)
        capacity.note_read("lane", first, 1, num_batch=1)
        assert await asked(capacity) == ReadRequest(2, batch=1)
        capacity.note_read(None, ReadRequest(2, batch=1), 1, num_batch=1)
        assert await asked(capacity) == ReadRequest(2, batch=0)
        capacity.note_read(None, ReadRequest(2, batch=0))
        capacity.note_prepared(is_batch=True)
        capacity.note_prepared(is_batch=True)
        assert await asked(capacity) == ReadRequest(2, batch=2)

    asyncio.run(scenario())


def test_one_at_a_time_and_no_more_than_give_way():
    asyncio.run(take_one_after_another())


async def take_one_after_another() -> None:
    capacity = room_with(BATCH, BATCH)
    for name, num_waiting in (("first", 1), ("second", 2)):
        assert await asked(capacity) == ReadRequest(1, "normal")
        assert await asked(capacity) == ReadRequest(1, "normal")  # another lane took up none
        capacity.note_read(None, ReadRequest(2), 1)
        assert await asked(capacity) == TEXTS  # being prepared
        capacity.note_read(None, TEXTS)
        enter(capacity, [(name, NORMAL)])
        capacity.note_prepared()
        assert await asked(capacity) == ReadRequest(1, "high")  # no token yet: no room?
        capacity.note_read(None, ReadRequest(1))
        tell(capacity, [name], num_waiting)
    assert await asked(capacity) == ReadRequest(1, "high")  # both of the lowest class wait already
    capacity.note_read(None, ReadRequest(1))
    capacity.leave("first")
    tell(capacity, ["second"], 1)
    assert await asked(capacity) == ReadRequest(1, "normal")


@on_a_lane
async def test_of_a_full_workers_read_is_what_waits_in_the_higher_classes(
    queue: WorkerQueue,
) -> None:
    handed_back = a_job(priority_class="high")
    await queue.enqueue(handed_back, None)
    taken = await started(queue)
    await queue.release("w", [taken.job.job_id])
    jobs = {name: a_job(priority_class=name) for name in ("batch", "normal", "high")}
    for job in jobs.values():
        await queue.enqueue(job, None)

    async def read(down_to: str | None) -> list[str]:
        return [one.job_id for one in await queue.read("w", 8, down_to=down_to) or []]

    assert await read("high") == [jobs["high"].job_id]
    assert await read("high") == []
    assert await read("normal") == [jobs["normal"].job_id]
    assert await read(None) == [handed_back.job_id, jobs["batch"].job_id]
    assert await finish(queue, taken, []) is False


BATCH_PARAMS = SamplingParams(max_tokens=300, seed=3, ignore_eos=True)
HIGH_PARAMS = SamplingParams(max_tokens=12, seed=4, ignore_eos=True)
PROMPTS = ["Once upon a time", "The river was"]


@pytest.mark.slow
@pytest.mark.timeout(400)  # two models are loaded
def test_a_high_job_begins_on_a_full_worker_and_all_texts_are_whole(redis_url: str) -> None:
    flags = ("--deterministic", "--max-num-seqs", "2", "--lease-ttl-ms", "5000")
    preempts = ("--priority-preemption-threshold", "1")
    offline = LLM(str(BUNDLED_MODEL), deterministic=True)
    expected = offline.generate(PROMPTS, BATCH_PARAMS)
    [expected_high] = offline.generate("Now!", HIGH_PARAMS)

    async def asks(client: QueueClient) -> None:
        batch = [
            await client.enqueue(
                prompt, params=BATCH_PARAMS, priority_class="batch", background=True
            )
            for prompt in PROMPTS
        ]
        for job_id in batch:
            while (await client.status(job_id)).num_tokens < 10:
                await asyncio.sleep(0.01)
        high = await client.enqueue("Now!", params=HIGH_PARAMS, priority_class="high")
        async for event in client.stream(high):
            assert isinstance(event, Delta)
            break
        states = [await client.status(job_id) for job_id in batch]
        assert [state.state for state in states] == ["decoding"] * 2
        assert all(state.num_tokens < 300 for state in states)
        same(await client.result(high), expected_high)
        for job_id, output in zip(batch, expected, strict=True):
            same(await client.result(job_id), output)
        [queue] = await client.queues()
        async with asyncio.timeout(30):
            while not (count := (await queue.workers())[0].stats.get("num_preemptions")):
                await asyncio.sleep(0.1)  # told with a beat
        assert count == 1

    model: Path = BUNDLED_MODEL
    with WorkerProcess(redis_url, model, *flags, *preempts) as worker:
        worker.ready()
        ask(redis_url, asks)

"""One tenant's long jobs hold all rows of a worker: another's short job has one of them soon."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.gateway.queue_client import QueueClient
from penstock.schemas.delivery import HeldRows
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.messages import AddSequence, BatchLoad, Load, Output
from penstock.worker.jobs.capacity import Capacity
from penstock.worker.llm import LLM
from penstock.worker.process.ipc import Step
from worker_process import WorkerProcess, ask, same

LIMITS = EngineLimits(
    100, 256, num_blocks=1000, block_size=16, max_num_seqs=4, eos_token_ids=frozenset()
)
NOTHING = BatchLoad(0, 0, 4)
LONG = SamplingParams(max_tokens=3500, seed=3, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, seed=4, ignore_eos=True)


def enter(capacity: Capacity, names: Iterable[str], priority: int = 1) -> None:
    """Sequences whose owner is the first letter of their names; one of `w` has the weight 4."""
    capacity.enter(
        AddSequence(
            name,
            [1],
            SHORT,
            priority=priority,
            owner=name[0],
            weight=4 if name[0] == "w" else 1,
        )
        for name in names
    )


def tell(
    capacity: Capacity,
    names: Iterable[str],
    num_waiting: int = 0,
    batch: BatchLoad | None = NOTHING,
) -> None:
    outputs = [Output(name, [1]) for name in names]
    capacity.note(Step(outputs, Load(len(outputs), num_waiting, batch)))


async def held_rows(capacity: Capacity) -> dict[str, HeldRows]:
    reader = object()
    ask = await capacity.wait(reader)
    capacity.note_read(reader, ask)
    return dict(ask.held_rows)


@pytest.mark.parametrize(
    ("names", "num_waiting", "expected"),
    [
        ("a1 a2 a3 a4", 0, HeldRows("a", 1, {"a": 4})),
        ("a1 a2 a3 b4", 0, HeldRows("a", 1, {"a": 3, "b": 1})),
        ("a1 a2 b3 c4", 0, HeldRows("a", 1, {"a": 2, "b": 1, "c": 1})),
        ("a1 b2 c3 d4", 0, None),
        ("a1 a2 w3 w4", 0, HeldRows("a", 1, {"a": 2, "w": 2})),
        ("a1 a2 a3 a4 b5 b6", 2, HeldRows("a", 1, {"a": 2, "b": 2})),
        ("a1 a2 a3 b4 b5", 1, HeldRows("a", 1, {"a": 2, "b": 2})),
        ("a1 a2 b3 b4 c5", 1, None),
    ],
)
def test_a_full_worker_tells_whose_row_another_could_get(names, num_waiting, expected):
    async def scenario() -> None:
        capacity = Capacity(LIMITS, 1)
        enter(capacity, names.split())
        tell(capacity, names.split(), num_waiting)
        assert (await held_rows(capacity)).get("normal") == expected

    asyncio.run(scenario())


def test_one_job_at_a_time_is_read_for_a_row_of_another():
    async def scenario() -> None:
        capacity = Capacity(LIMITS, 1)
        enter(capacity, ["a1", "a2", "a3", "a4"])
        tell(capacity, ["a1", "a2", "a3", "a4"])
        ask = await capacity.wait("one lane")
        assert ask.held_rows and not (await capacity.wait("another lane")).held_rows
        capacity.note_read("another lane", ask)
        capacity.note_read("one lane", ask, 1)
        assert await held_rows(capacity) == {}  # it is being prepared
        enter(capacity, ["b5"])
        capacity.note_prepared()
        tell(capacity, ["a1"])
        assert await held_rows(capacity) == {}  # no token yet: perhaps it has no row
        tell(capacity, ["b5"], 1)
        assert (await held_rows(capacity))["normal"] == HeldRows("a", 1, {"a": 3, "b": 1})

    asyncio.run(scenario())


def test_who_waits_of_the_tenant_with_the_most_keeps_nobody_out():
    async def scenario() -> None:
        capacity = Capacity(LIMITS, 1)
        enter(capacity, [f"a{at}" for at in range(8)])
        tell(capacity, ["a0", "a1", "a2", "a3"], 4)
        assert (await held_rows(capacity))["normal"] == HeldRows("a", 1, {"a": 4})

    asyncio.run(scenario())


def test_rows_of_an_engine_where_nothing_gives_way_are_nobodys():
    async def scenario() -> None:
        capacity = Capacity(replace(LIMITS, max_num_seqs=2), 1)
        enter(capacity, ["a1", "a2"])
        tell(capacity, ["a1", "a2"], batch=None)
        assert await held_rows(capacity) == {}

    asyncio.run(scenario())


def test_of_a_class_are_the_rows_of_it_and_of_lower_ones_but_for_a_batch():
    async def scenario() -> None:
        capacity = Capacity(LIMITS, 1)
        enter(capacity, ["a1"], priority=0)
        enter(capacity, ["a2", "a3", "b4"], priority=1)
        enter(capacity, ["a5"], priority=2)
        tell(capacity, ["a1", "a2", "a3", "b4", "a5"])
        found = await held_rows(capacity)
        assert found["normal"] == HeldRows("a", 1, {"a": 2, "b": 1})
        assert found["high"] == HeldRows("a", 1, {"a": 3, "b": 1})

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.timeout(400)  # two models are loaded
def test_a_short_job_ends_while_all_long_ones_of_another_tenant_run(redis_url: str) -> None:
    """And what they say is what they say alone."""
    flags = ("--deterministic", "--max-num-seqs", "2", "--lease-ttl-ms", "5000")
    prompts = ["Once upon a time", "The river was"]
    offline = LLM(str(BUNDLED_MODEL), deterministic=True)
    expected = offline.generate(prompts, LONG)
    [expected_short] = offline.generate("Now!", SHORT)

    async def asks(client: QueueClient) -> None:
        async def submit(tenant: str, prompt: str, params: SamplingParams) -> str:
            return await client.enqueue(prompt, params=params, tenant=tenant, background=True)

        long = [await submit("a", prompt, LONG) for prompt in prompts]
        for job_id in long:
            while (await client.status(job_id, tenant="a")).num_tokens < 10:
                await asyncio.sleep(0.01)
        waits = await submit("a", prompts[0], SHORT)
        short = await submit("b", "Now!", SHORT)
        same(await client.result(short, tenant="b"), expected_short)
        states = [(await client.status(each, tenant="a")).state for each in (*long, waits)]
        assert states == ["decoding", "decoding", "ready"]
        for job_id, output in zip(long, expected, strict=True):
            same(await client.result(job_id, tenant="a"), output)
        assert (await client.result(waits, tenant="a")).state == "succeeded"

    model: Path = BUNDLED_MODEL
    with WorkerProcess(redis_url, model, *flags) as worker:
        worker.ready()
        ask(redis_url, asks)

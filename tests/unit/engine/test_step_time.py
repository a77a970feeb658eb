"""A step's time is predicted from the last ones, and prompts are read within it."""

import random
from itertools import pairwise

import numpy as np
import pytest

from forgetful import addition, assert_idle_and_whole, expected_completion, make_engine, stepped
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.scheduling.step_time import LEAST_TOKENS, StepTime, num_pairs

MOST_S = 0.2
FIXED_S, TOKEN_S, PAIR_S = 0.01, 0.0005, 4e-7


class Machine(StepTime):
    """It takes the time that it says, whatever a step of the test takes."""

    def __init__(self, noise: float = 0.0, slow_at_start: float = 1.0, each: float = 1.0) -> None:
        self.each, self.noise, self.rng = each, noise, random.Random(3)
        slices = ((1, 0), (64, 0), (64, 1024))
        sizes = [(num_pairs(np.array([start]), np.array([count]))) for count, start in slices]
        measured = [
            (count, start, slow_at_start * self.cost_s(count, pairs))
            for (count, start), pairs in zip(slices, sizes, strict=True)
        ]
        super().__init__(MOST_S, measured)
        self.steps: list[float] = []

    def cost_s(self, num_tokens: int, pairs: float) -> float:
        seconds = FIXED_S + TOKEN_S * num_tokens + PAIR_S * pairs
        return self.each * seconds * self.rng.uniform(1.0, 1.0 + self.noise)

    def note_step(self, num_tokens: int, pairs: float, seconds: float) -> None:
        self.steps.append(self.cost_s(num_tokens, pairs))
        super().note_step(num_tokens, pairs, self.steps[-1])


def engine_on(machine: Machine, **given: int | bool) -> Engine:
    sizes = {"num_blocks": 900, "block_size": 16, "max_num_seqs": 64, "budget": 4096}
    engine, _ = make_engine(**sizes | given)
    engine.scheduler.step_time = machine
    return engine


def slices(engine: Engine, name: str) -> list[int]:
    """The steps' token counts of a sequence, until all have ended."""
    counts: list[int] = []
    engine.note_plan = lambda plan: counts.extend(row[1] for row in plan if row[0] == name)
    while engine.busy:
        engine.step()
    return counts


def beside_streams(machine: Machine, length: int, streams: int = 4) -> list[int]:
    """The slices of a prompt that comes while some streams run, and the steps' times with it."""
    engine = engine_on(machine)
    for number in range(streams):
        engine.add(addition(f"s{number}", [number] * 8, 200))
    stepped(engine, 120)
    machine.steps.clear()
    engine.add(addition("long", [7] * length, 1))
    counts: list[int] = []
    engine.note_plan = lambda plan: counts.extend(row[1] for row in plan if row[0] == "long")
    while sum(counts) < length:
        engine.step()
    return counts


@pytest.mark.parametrize("each", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_long_prompts_steps_take_what_they_may_and_no_longer(each: float, noise: float) -> None:
    machine = Machine(noise, each=each)
    counts = beside_streams(machine, 2000)
    assert sum(counts) == 2000
    full = machine.steps[3:-1] or machine.steps[1:-1]
    assert all(seconds <= 1.3 * MOST_S for seconds in machine.steps)
    assert all(seconds >= 0.6 * MOST_S for seconds in full)


def test_its_slices_get_shorter_as_what_they_attend_to_gets_longer() -> None:
    counts = beside_streams(Machine(), 3000)
    assert len(counts) > 6 and counts[3] > 1.3 * counts[-2]
    assert all(after <= before + 8 for before, after in pairwise(counts[3:-1]))


@pytest.mark.parametrize("slow_at_start", [0.2, 5.0])
def test_a_start_on_a_machine_that_was_busy_or_not_is_forgotten(slow_at_start: float) -> None:
    machine = Machine(slow_at_start=slow_at_start)
    beside_streams(machine, 2000)
    assert all(0.7 * MOST_S < seconds < 1.3 * MOST_S for seconds in machine.steps[3:-1])


def test_a_step_that_a_neighbour_disturbs_changes_little() -> None:
    machine = Machine()
    beside_streams(machine, 2000)
    before = machine.terms
    StepTime.note_step(machine, 300, 100_000.0, 9.0)
    assert np.allclose(machine.terms, before, rtol=0.05)


def test_streams_get_their_token_in_each_step_though_they_alone_take_too_long() -> None:
    machine = Machine(each=8.0)
    engine = engine_on(machine)
    for number in range(40):
        engine.add(addition(f"s{number}", [number] * 8, 400))
    stepped(engine, 40)
    assert machine.steps[-1] > MOST_S
    plans: list[dict[str, int]] = []
    engine.note_plan = lambda plan: plans.append({row[0]: row[1] for row in plan})
    engine.add(addition("long", [7] * 100, 1))
    engine.add(addition("another", [8] * 100, 1))
    while not plans or "another" not in plans[-1]:
        engine.step()
    read = [plan["long"] for plan in plans if "long" in plan]
    assert read[0] == LEAST_TOKENS and sum(read) == 100
    assert all(plan[f"s{number}"] == 1 for plan in plans for number in range(40))


def test_who_waits_comes_in_while_a_step_has_time_and_else_after_the_first() -> None:
    engine = engine_on(Machine())
    plans: list[list[str]] = []
    engine.note_plan = lambda plan: plans.append([row[0] for row in plan])
    for number in range(6):
        engine.add(addition(f"p{number}", [number] * 250, 1))
    stepped(engine, 4)
    assert plans[:2] == [["p0", "p1"], ["p1", "p2"]]  # the second in what the first leaves


def test_without_a_bound_a_step_is_as_long_as_its_tokens_take() -> None:
    engine, _ = make_engine(num_blocks=200, block_size=16, budget=1000)
    engine.add(addition("long", [7] * 2000, 1))
    assert slices(engine, "long") == [1000, 1000]


def test_nothing_is_predicted_before_a_step() -> None:
    assert StepTime(MOST_S).terms == (0, 0, 0)
    starts, counts = np.array([5, 0]), np.array([1, 900])
    assert StepTime(MOST_S).within(starts, counts).tolist() == [1, 900]


def test_a_pair_is_a_token_and_each_that_it_attends_to() -> None:
    by_hand = sum(at + 1 for at in range(5, 12)) + 101
    assert num_pairs(np.array([5, 100]), np.array([7, 1])) == by_hand


@pytest.mark.parametrize("seed", range(60))
def test_it_changes_no_completion(seed: int) -> None:
    rng = random.Random(seed)
    machine = Machine(noise=1.0, slow_at_start=rng.choice([0.2, 1, 5]), each=rng.choice([1, 5, 30]))
    engine = engine_on(
        machine,
        num_blocks=rng.randrange(20, 40),
        block_size=4,
        max_num_seqs=rng.randrange(1, 6),
        goes_ahead=seed % 2 == 0,
        budget=rng.choice([8, 64]),
    )
    trace = [
        addition(str(n), [n] * rng.randrange(1, 60), rng.randrange(1, 20), priority=n % 3)
        for n in range(12)
    ]
    said: dict[str, list[int]] = {}
    pending = [*trace]
    while engine.busy or pending:
        if pending and rng.random() < 0.3:
            engine.add(pending.pop())
        for output in engine.step():
            said.setdefault(output.seq_id, []).extend(output.token_ids)
    for asked in trace:
        expected = expected_completion(asked.prompt, asked.params.max_tokens)
        assert said[asked.seq_id] == expected
    assert_idle_and_whole(engine)

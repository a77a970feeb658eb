"""What the class `batch` may take of a step beside others."""

import random
from itertools import pairwise

import pytest

from forgetful import addition, assert_idle_and_whole, make_engine, running, stepped
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.messages import BatchLoad
from penstock.worker.engine.scheduling.batch_bound import BatchBound


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def served(fixed_s: float, token_s: float, noise: float = 0.0) -> BatchBound:
    """The bound where others are served, after steps that take so long."""
    bound, rng = BatchBound(Clock()), random.Random(5)
    bound.note_others()
    for _ in range(300):
        num_tokens = rng.choice([1, 2, 3, 5, 8, 200])
        seconds = fixed_s + token_s * num_tokens
        bound.note_step(num_tokens, seconds * rng.uniform(1 - noise, 1 + noise))
    return bound


@pytest.mark.parametrize(
    ("fixed_s", "token_s", "expected"),
    [(0.010, 0.001, 2), (0.010, 0.0001, 25), (0.0, 0.001, 1), (0.001, 0.001, 1)],
)
def test_it_is_a_quarter_of_what_a_step_takes_whatever_it_computes(fixed_s, token_s, expected):
    assert served(fixed_s, token_s).most_tokens in (expected - 1, expected) or expected == 1
    assert served(fixed_s, token_s).most_tokens >= 1
    assert served(fixed_s, token_s, noise=0.1).most_tokens <= 2 * expected


def test_what_was_never_measured_is_approached_by_doubling() -> None:
    bound = BatchBound(Clock())
    bound.note_others()
    assert bound.most_tokens == 1
    found = []
    for _ in range(8):
        assert bound.most_tokens is not None
        for num_tokens in (1, bound.most_tokens):
            bound.note_step(num_tokens, 0.006 + 1e-6 * num_tokens)
        found.append(bound.most_tokens)
    assert found[:2] == [2, 4] and all(after <= 2 * most for most, after in pairwise(found))


def test_there_is_none_where_nobody_else_was_served_for_ten_seconds() -> None:
    clock = Clock()
    bound = BatchBound(clock)
    assert bound.most_tokens is None
    bound.note_others()
    clock.now_s += 9.9
    assert bound.most_tokens is not None
    clock.now_s += 0.2
    assert bound.most_tokens is None


class Fixed(BatchBound):
    """It lets so many tokens through."""

    def __init__(self, most: int, clock: Clock) -> None:
        super().__init__(clock)
        self.most = most

    @property
    def most_tokens(self) -> int | None:
        return None if super().most_tokens is None else self.most


def bounded(most: int, **given: int | bool) -> tuple[Engine, Clock]:
    engine, _ = make_engine(**given)
    clock = Clock()
    engine.scheduler.batch_bound = Fixed(most, clock)
    return engine, clock


def lengths(engine: Engine) -> dict[str, int]:
    return {seq.seq_id: len(seq.token_ids) for seq in engine.scheduler.running}


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_beside_others_the_first_of_a_batch_go_on_and_the_rest_stand_still(
    goes_ahead: bool,
) -> None:
    engine, clock = bounded(2, goes_ahead=goes_ahead)
    for name in "abcd":
        engine.add(addition(name, [1] * 3, 40, priority=2, turn=ord(name)))
    stepped(engine, 6)
    before = lengths(engine)
    assert len(set(before.values())) == 1
    engine.add(addition("normal", [9] * 5, 12, priority=1))
    held = engine.load().num_held_blocks
    stepped(engine, 8)
    grown = {name: length - before.get(name, 5) for name, length in lengths(engine).items()}
    assert grown["c"] <= 1 and grown["d"] <= 1  # at most a step that was launched before
    assert min(grown[name] for name in ("a", "b", "normal")) >= 6
    assert engine.load().num_held_blocks >= held
    while "normal" in lengths(engine):
        engine.step()
    after = lengths(engine)
    clock.now_s += 11
    stepped(engine, 4)
    assert all(length > after[name] for name, length in lengths(engine).items())
    while engine.busy:
        engine.step()
    assert_idle_and_whole(engine)


def test_a_batchs_prompt_is_read_beside_others_in_small_slices() -> None:
    engine, _ = bounded(3, budget=64)
    plans = []
    engine.note_plan = plans.append
    engine.add(addition("normal", [1], 30, priority=1))
    engine.add(addition("batch", [2] * 20, 2, priority=2))
    while engine.busy:
        engine.step()
    slices = [count for plan in plans for name, count, _ in plan if name == "batch"]
    assert slices == [3] * 6 + [2, 1]


def test_nobody_else_waits_for_a_prefix_that_a_batch_reads_slowly() -> None:
    engine, _ = bounded(1, budget=64)
    engine.add(addition("normal", [1], 60, priority=1))
    stepped(engine, 2)
    prefix = list(range(40))
    engine.add(addition("batch", [*prefix, 50], 2, priority=2))
    stepped(engine, 2)
    for name in ("first", "second"):
        engine.add(addition(name, [*prefix, 60], 2, priority=1, turn=len(name)))
    computed = engine.stats().computed_tokens
    ended = [one.seq_id for _ in range(4) for one in engine.step() if one.finish_reason]
    assert ended == ["first", "second"]
    # Both read the prefix once, and all wait for the first of them.
    assert engine.stats().computed_tokens - computed < 41 + 1 + 2 + 2 * 4 + 4
    ended += [one.seq_id for _ in range(6) for one in engine.step() if one.finish_reason]
    assert ended[2:] == []  # it began before the prefix was there


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_who_stood_still_goes_on_when_another_ends(goes_ahead: bool) -> None:
    engine, _ = bounded(1, goes_ahead=goes_ahead)
    engine.add(addition("normal", [1], 60, priority=1))
    stepped(engine, 2)
    for name in "ab":
        engine.add(addition(name, [2], 8, priority=2, turn=ord(name)))
    engine.scheduler.batch_bound.most = 2
    stepped(engine, 2)
    engine.scheduler.batch_bound.most = 1
    engine.add(addition("another", [3], 2, priority=1))
    ended = [one.seq_id for _ in range(22) for one in engine.step() if one.finish_reason]
    assert ended == ["another", "a", "b"]


def test_of_a_full_batch_the_last_give_way_to_each_that_comes() -> None:
    engine, _ = bounded(1, max_num_seqs=4)
    for name in "abcd":
        engine.add(addition(name, [1] * 3, 40, priority=2, turn=ord(name)))
    stepped(engine, 2)
    for number in range(3):
        engine.add(addition(f"n{number}", [number], 30, priority=1, turn=number))
    stepped(engine, 3)  # one a step
    assert running(engine) == ["n0", "n1", "n2", "a"]
    load = engine.load()
    assert load.num_waiting == 0 and load.batch == BatchLoad(2, 3, 2)
    assert load.num_held_blocks == 5


@pytest.mark.parametrize("seed", range(60))
def test_it_changes_no_completion(seed: int) -> None:
    rng = random.Random(seed)
    given = {"num_blocks": rng.randrange(12, 30), "max_num_seqs": rng.randrange(1, 6)}
    engine, clock = bounded(rng.randrange(1, 5), goes_ahead=seed % 2 == 0, **given)
    alone, _ = make_engine()
    trace = [
        addition(str(n), [n] * rng.randrange(1, 15), rng.randrange(1, 20), priority=n % 3)
        for n in range(12)
    ]
    said: dict[str, list[int]] = {}
    pending = [*trace]
    while engine.busy or pending:
        if pending and rng.random() < 0.3:
            engine.add(pending.pop())
        clock.now_s += rng.choice([0, 0, 0, 3])
        for output in engine.step():
            said.setdefault(output.seq_id, []).extend(output.token_ids)
    for given_one in trace:
        alone.add(given_one)
        expected: list[int] = []
        while alone.busy:
            for output in alone.step():
                expected += output.token_ids
        assert said[given_one.seq_id] == expected
    assert_idle_and_whole(engine)

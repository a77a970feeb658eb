"""Rows are shared among owners: who has more than its share gives way to who waits."""

import random
from collections import Counter

import pytest

from forgetful import (
    VOCAB,
    addition,
    assert_idle_and_whole,
    expected_completion,
    make_engine,
    run_to_end,
    running,
    stepped,
)
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.messages import AddSequence

NORMAL = 1


def owned(
    name: str, num_tokens: int = 100, num_prompt: int = 3, choice: int = 0, **more: object
) -> AddSequence:
    """A sequence whose owner is the first letter of its name."""
    prompt = [(ord(name[0]) + int(name[1:])) % VOCAB] * num_prompt
    order = {"priority": NORMAL, "turn": int(name[1:]), "owner": name[0], **more}
    return addition(name, prompt, num_tokens, choice=choice, **order)


def engine_with(*names: str, goes_ahead: bool = False, **given: int) -> Engine:
    engine, _ = make_engine(200, budget=64, goes_ahead=goes_ahead, **given)
    for name in names:
        engine.add(owned(name))
    stepped(engine, 5)
    return engine


def ends(engine: Engine, most_steps: int = 10_000) -> list[str]:
    """The names in the order of their ends."""
    found: list[str] = []
    for _ in range(most_steps):
        if not engine.busy:
            break
        found += [each.seq_id for each in engine.step() if each.finish_reason]
    return found


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_a_short_one_of_another_owner_ends_while_the_long_ones_run(goes_ahead: bool) -> None:
    engine = engine_with("a1", "a2", goes_ahead=goes_ahead, max_num_seqs=2)
    engine.add(owned("b3", 5))
    stepped(engine, 2)
    assert running(engine) == ["a1", "b3"] or running(engine) == ["b3", "a1"]
    assert ends(engine) == ["b3", "a1", "a2"]
    assert engine.stats().num_preemptions == 1


def test_it_goes_before_what_the_owner_of_the_others_has_in_line() -> None:
    engine = engine_with("a1", "a2", "a3", "a4", max_num_seqs=2)
    engine.add(owned("b9", 5))
    assert ends(engine)[0] == "b9"


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_a_single_owner_never_gives_way_to_itself(goes_ahead: bool) -> None:
    engine = engine_with(*(f"a{at}" for at in range(6)), goes_ahead=goes_ahead, max_num_seqs=2)
    assert ends(engine) == [f"a{at}" for at in range(6)]
    assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize("goes_ahead", [False, True])
@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"a": 1, "b": 1}, {"a": 4, "b": 4}),
        ({"a": 1, "b": 3}, {"a": 2, "b": 6}),
        ({"a": 1, "b": 1, "c": 1}, {"a": 3, "b": 3, "c": 2}),
        ({"a": 1, "b": 2, "c": 1}, {"a": 3, "b": 3, "c": 2}),
        ({"a": 1, "b": 1000}, {"a": 1, "b": 7}),
    ],
)
def test_an_owner_gives_way_down_to_its_share(
    weights: dict[str, float], expected: dict[str, int], goes_ahead: bool
) -> None:
    engine, _ = make_engine(400, max_num_seqs=8, budget=64, goes_ahead=goes_ahead)
    turn = 0
    for owner, weight in weights.items():
        for _ in range(8 if owner == "a" or len(weights) == 2 else 3):
            turn += 1
            engine.add(owned(f"{owner}{turn}", weight=weight))
    stepped(engine, 30)
    rows = Counter(name[0] for name in running(engine))
    assert sum(rows.values()) == 8
    num_preemptions = engine.stats().num_preemptions
    stepped(engine, 30)
    assert engine.stats().num_preemptions == num_preemptions, "rows came to rest"
    assert rows == expected


def test_with_more_owners_than_rows_nobody_is_turned_out() -> None:
    engine = engine_with("a1", "b2", max_num_seqs=2)
    engine.add(owned("c3", 5))
    assert ends(engine) == ["a1", "b2", "c3"]
    assert engine.stats().num_preemptions == 0


def test_blocks_are_taken_from_who_has_more_rows_where_they_are_enough() -> None:
    engine, _ = make_engine(num_blocks=24, block_size=4, max_num_seqs=8, budget=64)
    for at in range(3):
        engine.add(owned(f"a{at}", 8, num_prompt=25))
    stepped(engine, 2)
    engine.add(owned("b8", 2, num_prompt=33))
    stepped(engine, 1)
    assert sorted(running(engine)) == ["a0", "a1", "b8"]
    engine.add(owned("c9", 2, num_prompt=80))  # more than all that may give way hold
    stepped(engine, 1)
    assert engine.stats().num_preemptions == 1
    assert sorted(ends(engine)) == ["a0", "a1", "a2", "c9"]


@pytest.mark.parametrize(("priority", "yields"), [(0, True), (1, True), (2, False)])
def test_it_holds_for_those_of_the_same_class_and_lower_ones(priority: int, yields: bool) -> None:
    engine = engine_with("a1", "a2", max_num_seqs=2)
    engine.add(owned("b3", 5, priority=priority))
    assert (ends(engine)[0] == "b3") == yields


@pytest.mark.parametrize("seed", range(100))
def test_whatever_gives_way_no_completion_changes_and_all_end(seed: int) -> None:
    rng = random.Random(seed)
    longest, block_size = rng.randrange(12, 40), rng.choice([1, 2, 4])
    num_states = rng.choice([None, None, 0, 3])
    engine, _ = make_engine(
        -(-longest // block_size) * rng.randrange(1, 4),
        block_size,
        rng.randrange(1, 6),
        rng.randrange(1, 30),
        threshold=rng.choice([None, 1]),
        goes_ahead=seed % 2 == 0,
        num_states=num_states,
    )
    trace = []
    for at in range(rng.randrange(2, 20)):
        num_prompt = rng.randrange(1, longest // 2)
        num_tokens = rng.randrange(1, longest - num_prompt)
        owner, priority = rng.choice("aaabc"), rng.choice([0, 1, 1, 1, 2])
        trace.append(owned(f"{owner}{at}", num_tokens, num_prompt, priority=priority))
    said: dict[str, list[int]] = {given.seq_id: [] for given in trace}
    pending = [*reversed(trace)]
    for _ in range(10_000):
        if pending and rng.random() < 0.3:
            engine.add(pending.pop())
        for output in engine.step():
            said[output.seq_id] += output.token_ids
        if not engine.busy and not pending:
            break
    for given in trace:
        wanted = expected_completion(
            given.prompt, given.params.max_tokens, is_stateful=num_states is not None
        )
        assert said[given.seq_id] == wanted, (seed, given.seq_id)
    assert_idle_and_whole(engine)


def test_owners_that_both_wait_never_take_a_row_from_each_other_in_turns() -> None:
    engine, _ = make_engine(400, max_num_seqs=3, budget=64)
    trace = [owned(f"{'ab'[at % 2]}{at}", 20) for at in range(12)]
    run_to_end(engine, trace)
    assert engine.stats().num_preemptions <= 12

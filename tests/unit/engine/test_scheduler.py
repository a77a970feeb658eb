"""The engine's core, on a model that forgets all but its slots."""

import hashlib
import random
from itertools import pairwise

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
from penstock.schemas.metrics import names
from penstock.schemas.metrics.tally import read_dump
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.messages import AddSequence, StoredBlock


def random_trace(rng: random.Random, longest: int) -> list[AddSequence]:
    stems = [
        [rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest // 2))] for _ in range(3)
    ]
    trace = []
    for number in range(rng.randrange(1, 12)):
        prompt = rng.choice(stems) + [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 6))]
        order = {"priority": rng.randrange(3), "turn": rng.randrange(3)}
        order |= {"owner": rng.choice("aabc"), "weight": rng.choice([0.5, 1, 1, 3])}
        length = rng.randrange(1, longest - len(prompt) + 1)
        num_choices = rng.choice([1, 1, 2, 5])
        group = str(number) if num_choices > 1 else ""
        trace += [
            addition(f"{number}.{choice}", prompt, length, choice=choice, group=group, **order)
            for choice in range(num_choices)
        ]
    return trace


@pytest.mark.parametrize("seed", range(100))
def test_the_changes_of_each_step_rebuild_what_is_remembered(seed: int) -> None:
    rng = random.Random(seed)
    block_size, longest = rng.choice([1, 2, 4]), rng.randrange(12, 40)
    num_blocks = -(-longest // block_size) + rng.randrange(3)
    engine, _ = make_engine(num_blocks, block_size, goes_ahead=seed % 2 == 0)
    changes, blocks = engine.follow_blocks(with_token_ids=True), dict[bytes, StoredBlock]()
    for given in random_trace(rng, longest):
        engine.add(given)
    while engine.busy:
        engine.step()
        for change in changes.take():
            if isinstance(change, bytes):
                del blocks[change]
            else:
                assert change.digest not in blocks
                blocks[change.digest] = change
        assert blocks.keys() == engine.scheduler.pool._blocks.keys()
    root = hashlib.blake2b(b"", digest_size=16).digest()
    for block in blocks.values():
        tokens = b"".join(token.to_bytes(4, "little") for token in block.token_ids)
        before = root if block.parent is None else block.parent
        assert block.digest == hashlib.blake2b(before + tokens, digest_size=16).digest()


@pytest.mark.parametrize("num_states", [None, 0, 1, 2, 5])
@pytest.mark.parametrize("seeds", range(6))
def test_every_completion_equals_the_one_computed_alone(seeds: int, num_states: int | None) -> None:
    num_cached = 0
    for seed in range(100 * seeds, 100 * (seeds + 1)):
        stats = run_alike(seed, num_states).stats()
        num_cached += 0 if stats.forked_sequences else stats.cached_tokens
    assert (num_cached > 0) == (num_states != 0)


def run_alike(seed: int, num_states: int | None) -> Engine:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 7])
    longest = rng.randrange(12, 40)
    trace = random_trace(rng, longest)
    num_blocks = -(-longest // block_size) + rng.randrange(
        0, 4
    )  # just above the largest, so all compete
    engine, _ = make_engine(
        num_blocks,
        block_size,
        rng.randrange(1, 9),
        rng.randrange(1, 30),
        rng.random() < 0.8,
        rng.choice([None, 1, 2]),
        goes_ahead=seed % 2 == 0,
        num_states=num_states,
    )
    completions = run_to_end(engine, trace)
    for given in trace:
        wanted = expected_completion(
            given.prompt,
            given.params.max_tokens,
            is_stateful=num_states is not None,
            choice=given.choice,
        )
        assert completions[given.seq_id] == wanted, (seed, given.seq_id)
    assert_idle_and_whole(engine)
    return engine


def cached_tokens(engine: Engine, prompt: list[int], max_tokens: int = 1) -> int:
    """How many tokens of a prompt that is read now are found."""
    before = engine.stats().cached_tokens
    run_to_end(engine, [addition("one", prompt, max_tokens)])
    return engine.stats().cached_tokens - before


def test_of_a_prefix_with_states_its_end_is_found_and_where_others_part_from_it() -> None:
    engine, _ = make_engine(num_states=8)
    common, question = list(range(18)), [40, 41, 42, 43]
    assert cached_tokens(engine, common) == 0
    assert cached_tokens(engine, common) == 16
    assert cached_tokens(engine, [*common, *question]) == 16
    other = list(range(60, 85))
    assert cached_tokens(engine, [*other, 1, 2, 3, 4, 5]) == 0
    assert cached_tokens(engine, [*other, 6, 7, 8, 9]) == 0  # nothing is kept there yet
    assert cached_tokens(engine, [*other, 9, 8, 7, 6]) == 24


def test_sequences_that_begin_alike_wait_for_one_that_keeps_the_state() -> None:
    engine, runner = make_engine(num_states=8, budget=64)
    run_to_end(engine, [addition(str(at), [*range(18), *[50 + at] * 6], 2) for at in range(8)])
    steps = [dict(plan) for plan in runner.plans]
    assert sum(sum(step.values()) for step in steps) == 24 + 24 + 6 * 8 + 8
    assert engine.stats().cached_tokens == 6 * 16


def test_the_state_that_was_least_recently_of_use_is_forgotten_first() -> None:
    engine, _ = make_engine(num_states=2)
    first, second, third = (list(range(at, at + 9)) for at in (0, 20, 40))
    assert cached_tokens(engine, first) == cached_tokens(engine, second) == 0
    assert cached_tokens(engine, first) == 8
    assert cached_tokens(engine, third) == 0
    assert cached_tokens(engine, first) == 8
    assert cached_tokens(engine, second) == 0


@pytest.mark.parametrize("seed", range(100))
def test_columns_say_what_the_sequences_say(seed: int) -> None:
    rng = random.Random(seed)
    engine, _ = make_engine(
        num_blocks=14,
        budget=rng.randrange(1, 20),
        threshold=rng.choice([None, 1]),
        goes_ahead=seed % 2 == 0,
    )
    for given in random_trace(rng, longest=40):
        engine.add(given)
    scheduler, columns = engine.scheduler, engine.scheduler.columns
    while engine.busy:
        engine.step()
        empty = 0
        for seq in scheduler.running:
            assert columns.num_tokens[seq.row] == len(seq.token_ids)
            assert columns.num_blocks[seq.row] == len(seq.block_table)
            assert columns.last_token[seq.row] == seq.token_ids[-1]
            empty += len(seq.block_table) * 4 - int(columns.num_computed[seq.row])
        assert engine.stats().num_live_slots == scheduler.pool.num_held * 4 - empty


@pytest.mark.parametrize("count", [1, 4, 5, 30])
def test_any_of_many_stop_ids_ends_a_sequence(count: int) -> None:
    whole = expected_completion([1, 2, 3], 40)
    others = [token for token in range(VOCAB) if token not in whole[:10]][: count - 1]
    params = SamplingParams(max_tokens=40, temperature=0, stop_token_ids=[*others, whole[9]])
    engine, _ = make_engine()
    [made] = run_to_end(engine, [AddSequence("a", [1, 2, 3], params)]).values()
    assert made == whole[: whole.index(whole[9]) + 1]


@pytest.mark.parametrize("seed", range(100))
def test_cancelling_at_any_step_disturbs_nobody_and_frees_everything(seed: int) -> None:
    rng = random.Random(seed)
    engine, _ = make_engine(num_blocks=14, budget=rng.randrange(1, 20), goes_ahead=seed % 2 == 0)
    trace = random_trace(rng, 40)
    doomed = {given.seq_id for given in trace if rng.random() < 0.4}
    for given in trace:
        engine.add(given)
    completions: dict[str, list[int]] = {given.seq_id: [] for given in trace}
    while engine.busy:
        if doomed and rng.random() < 0.3:
            engine.cancel(doomed.pop())
            engine.cancel("unknown")
        for output in engine.step():
            completions[output.seq_id] += output.token_ids
    for given in trace:
        whole = expected_completion(given.prompt, given.params.max_tokens, choice=given.choice)
        assert completions[given.seq_id] == whole[: len(completions[given.seq_id])]
    assert_idle_and_whole(engine)


@pytest.mark.parametrize("seed", range(100))
def test_stop_ids_end_sequences_whose_next_step_was_launched(seed: int) -> None:
    """Their extra token is dropped, and their blocks serve others; those that wait come in."""
    rng = random.Random(seed)
    engine, _ = make_engine(14, max_num_seqs=3, goes_ahead=True)
    wanted, trace = {}, random_trace(rng, 40)
    for given in trace:
        whole = expected_completion(given.prompt, given.params.max_tokens, choice=given.choice)
        stop = whole[rng.randrange(len(whole))]
        given.params.stop_token_ids.append(stop)
        wanted[given.seq_id] = whole[: whole.index(stop) + 1]
    assert run_to_end(engine, trace) == wanted
    assert_idle_and_whole(engine)


def test_who_waits_for_a_prefix_starts_when_it_is_computed() -> None:
    """Although one behind it has no room, and steps are launched ahead."""
    engine, _ = make_engine(12, goes_ahead=True)
    shared = list(range(8))
    for name, prompt in (("first", shared), ("same", [*shared, 9]), ("large", [50] * 44)):
        engine.add(addition(name, prompt, 4))
    stepped(engine, 3)
    assert running(engine) == ["first", "same"]


def test_nothing_is_launched_for_who_ends_by_its_length() -> None:
    engine, runner = make_engine(40, goes_ahead=True)
    run_to_end(engine, [addition("a", [1, 2, 3], 5), addition("b", [4], 9)])
    steps = [dict(plan) for plan in runner.plans]
    assert sum("a" in step for step in steps) == 5
    assert len(steps) == 9


def test_decoding_goes_ahead_of_the_host_unless_somebody_could_start() -> None:
    engine, runner = make_engine(40, max_num_seqs=2, budget=64, goes_ahead=True)
    engine.add(addition("a", [1, 2, 3], 60))
    stepped(engine, 10)
    assert runner.num_ahead == 10, "each step but the first was launched by the one before"
    engine.add(addition("b", [3, 4], 60))
    stepped(engine, 2)
    assert running(engine) == ["a", "b"], "who arrives waits for the step that was launched"
    engine.add(addition("c", [5], 60))
    before = runner.num_ahead
    stepped(engine, 20)
    assert runner.num_ahead >= before + 18, "who finds no room holds nobody up"
    engine.cancel("a")
    stepped(engine, 2)
    assert running(engine) == ["b", "c"]


@pytest.mark.parametrize("seed", range(30))
def test_a_sequence_continues_from_its_token_ids_alone(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
    whole, cut = expected_completion(prompt, 12), rng.randrange(1, 12)
    engine, _ = make_engine()
    completions = run_to_end(engine, [addition("a", prompt, 12, completion=whole[:cut])])
    assert completions["a"] == whole[cut:]


def test_slices_of_long_prompts_and_decodes_share_a_step_within_the_budget() -> None:
    engine, runner = make_engine(num_blocks=100, budget=10)
    run_to_end(engine, [addition("short", [1], 30), addition("long", [2] * 70, 2)])
    assert max(sum(count for _, count in plan) for plan in runner.plans) <= 10
    assert [("short", 1), ("long", 9)] in runner.plans


def test_a_finished_sequence_is_replaced_in_the_next_step() -> None:
    engine, runner = make_engine(max_num_seqs=1, remembers=False)
    run_to_end(engine, [addition("a", [1], 2), addition("b", [2], 1)])
    assert runner.plans == [[("a", 1)], [("a", 1)], [("b", 1)]]


def test_the_class_decides_then_the_turn_then_the_arrival() -> None:
    engine, runner = make_engine(max_num_seqs=1, remembers=False)
    trace = [
        addition("batch", [1], 1, priority=2, turn=1),
        addition("late", [2], 1, priority=1, turn=9),
        addition("early", [3], 1, priority=1, turn=5),
        addition("early too", [4], 1, priority=1, turn=5),
        addition("high", [5], 1, priority=0, turn=99),
    ]
    run_to_end(engine, trace)
    names = [plan[0][0] for plan in runner.plans]
    assert names == ["high", "early", "early too", "late", "batch"]


def test_for_want_of_blocks_the_lowest_class_yields_then_the_latest_turn() -> None:
    engine, _ = make_engine(num_blocks=15, block_size=4, max_num_seqs=4, remembers=False)
    for name, priority, turn in (("b", 2, 1), ("n late", 1, 9), ("n early", 1, 2), ("h", 0, 9)):
        engine.add(addition(name, [1], 30, priority=priority, turn=turn))
    gone: list[str] = []
    engine.step()
    before = running(engine)
    while len(gone) < 3 and engine.busy:
        engine.step()
        now = running(engine)
        gone += [name for name in before if name not in now]
        before = now
    assert gone[:2] == ["b", "n late"]


@pytest.mark.parametrize(
    ("threshold", "priority", "yields"),
    [(None, 2, True), (None, 1, False), (1, 2, True), (2, 2, True), (1, 1, True), (2, 1, False)],
)
@pytest.mark.parametrize("scarce", ["rows", "blocks"])
def test_a_running_class_gives_way_from_the_threshold_on(
    threshold: int | None, priority: int, yields: bool, scarce: str
) -> None:
    num_blocks, rows = (100, 2) if scarce == "rows" else (8, 8)
    engine, _ = make_engine(num_blocks, 4, rows, threshold=threshold)
    prompts = {"a": [1] * 9, "b": [2] * 9, "high": [3] * 9}
    for name in "ab":
        engine.add(addition(name, prompts[name], 6, priority=priority, turn=ord(name)))
    stepped(engine, 2)
    engine.add(addition("high", prompts["high"], 6, priority=0, turn=999))
    engine.step()
    assert running(engine) == (["high", "a"] if yields else ["a", "b"])
    while engine.busy:
        engine.step()
    assert engine.stats().num_preemptions == int(yields)
    assert_idle_and_whole(engine)


def test_who_gave_way_finds_its_blocks_again() -> None:
    engine, _ = make_engine(100, 4, max_num_seqs=1, budget=64, threshold=1)
    engine.add(addition("batch", list(range(40)), 8, priority=2))
    stepped(engine, 3)
    engine.add(addition("high", [50, 51], 2))
    completions: dict[str, list[int]] = {"batch": [], "high": []}
    while engine.busy:
        for output in engine.step():
            completions[output.seq_id] += output.token_ids
    assert completions["batch"] == expected_completion(list(range(40)), 8)[3:]
    recomputed = engine.stats().computed_tokens - (40 + 7) - (2 + 1)
    assert 0 < recomputed < 4  # of its last block only


def test_nobody_gives_way_where_that_makes_no_room() -> None:
    engine, _ = make_engine(20, 4, max_num_seqs=8, threshold=1)
    engine.add(addition("normal", [1] * 40, 20, priority=1))
    engine.add(addition("batch", [2] * 8, 20, priority=2))
    stepped(engine, 4)
    engine.add(addition("high", [3] * 70, 4, priority=0))
    engine.step()
    assert running(engine)[0] == "high"  # both had to go, and both were enough
    while engine.busy:
        engine.step()
    engine.add(addition("high too", [4] * 40, 20, priority=0))
    engine.add(addition("batch", [2] * 8, 20, priority=2))
    stepped(engine, 4)
    engine.add(addition("high", [3] * 70, 4, priority=0))
    engine.step()
    assert running(engine) == ["high too", "batch"]


def test_a_flood_of_a_higher_class_does_not_starve_who_gave_way() -> None:
    engine, _ = make_engine(100, 4, max_num_seqs=2, threshold=1)
    for name in "ab":
        engine.add(addition(name, [ord(name) % VOCAB], 10, priority=1))
    engine.step()
    ended: list[str] = []
    for number in range(60):
        engine.add(addition(f"high {number}", [number], 4, turn=number))
        ended += [output.seq_id for output in engine.step() if output.finish_reason]
    assert {"a", "b"} <= set(ended)


@pytest.mark.parametrize("remembers", [True, False])
def test_steps_and_ends_of_sequences_are_tallied(remembers: bool) -> None:
    engine, _ = make_engine(num_blocks=12, block_size=4, remembers=remembers)
    again = addition("again", [9] * 5, 40, completion=[9, 9, 9])
    run_to_end(engine, [addition(str(n), [n] * 5, 20) for n in range(4)] + [again])
    stats = engine.stats()
    tallied = {
        each.stat: read_dump(each.bounds, [*stats.histograms[each.stat]])
        for each in names.STEP_HISTOGRAMS
    }
    (tokens, steps), (preemptions, ends), (prefilled, sequences) = (
        (told[0], told[1][-1])
        for stat in ("step_tokens", "request_preemptions", "prefill_computed_tokens")
        if (told := tallied[stat])
    )
    assert (tokens, steps) == (stats.computed_tokens, stats.num_steps)
    assert (preemptions, ends) == (stats.num_preemptions, 5) and preemptions > 0
    assert (prefilled, sequences) == (5 * 5, 5)
    needed = 4 * (5 + 19) + (5 + 39) - (5 + 2)  # another worker had computed the last seven
    assert stats.recomputed_tokens == stats.computed_tokens - needed


@pytest.mark.slow
def test_a_shared_prefix_is_computed_once_for_a_thousand_who_arrive_together() -> None:
    engine, _ = make_engine(num_blocks=3000, block_size=16, max_num_seqs=64, budget=8192)
    prefix = [number % VOCAB for number in range(2048)]
    trace = [addition(str(n), [*prefix, n % VOCAB, n // VOCAB], 2) for n in range(1000)]
    completions = run_to_end(engine, trace)
    stats = engine.stats()
    assert (
        stats.computed_tokens == 2048 + 1000 * 2 + 1000
    )  # the prefix, the suffixes, a decode each
    assert stats.cached_tokens == 999 * 2048
    assert completions["777"] == expected_completion(trace[777].prompt, 2)


def test_different_salts_share_no_block() -> None:
    engine, _ = make_engine()
    prompt = list(range(16))
    run_to_end(engine, [addition("a", prompt, 1, cache_salt=b"one")])
    run_to_end(engine, [addition("b", prompt, 1, cache_salt=b"two")])
    assert engine.stats().cached_tokens == 0
    run_to_end(engine, [addition("c", prompt, 1, cache_salt=b"one")])
    assert engine.stats().cached_tokens == 12  # not the block that holds the last token


def test_the_least_recently_used_prefix_is_forgotten_first() -> None:
    engine, _ = make_engine(num_blocks=9, block_size=4)
    for name, start in (("a", 0), ("b", 20), ("a again", 0), ("c", 40)):
        run_to_end(engine, [addition(name, list(range(start, start + 13)), 1)])
    before = engine.stats().cached_tokens
    run_to_end(engine, [addition("a", list(range(13)), 1)])
    assert engine.stats().cached_tokens == before + 12


def test_the_oldest_is_never_preempted() -> None:
    engine, runner = make_engine(num_blocks=12, block_size=4)
    run_to_end(engine, [addition(str(n), [n], 40) for n in range(4)])
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.recomputed_tokens == stats.computed_tokens - 4 * 40 > 0
    steps_of_oldest = [place for place, plan in enumerate(runner.plans) if plan[0][0] == "0"]
    assert steps_of_oldest == list(range(40))


@pytest.mark.parametrize(
    "prompt, params, param",
    [
        ([], SamplingParams(), "prompt"),
        ([1] * 256, SamplingParams(), "prompt"),
        ([1] * 250, SamplingParams(max_tokens=7), "max_tokens"),
        ([1] * 250, SamplingParams(max_tokens=None, min_tokens=7), "min_tokens"),
        ([VOCAB], SamplingParams(), "prompt"),
        ([1], SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias"),
        ([1], SamplingParams(stop_token_ids=[VOCAB + 5]), "stop_token_ids"),
        ([1], SamplingParams(logprobs=0, logprob_token_ids=[VOCAB]), "logprob_token_ids"),
    ],
)
def test_what_can_never_run_is_refused_by_name_and_disturbs_nobody(
    prompt: list[int], params: SamplingParams, param: str
) -> None:
    engine, _ = make_engine()
    engine.add(addition("good", [1, 2, 3], 5))
    engine.add(AddSequence("bad", prompt, params))
    outputs = [output for _ in range(10) for output in engine.step()]
    (refusal,) = [output for output in outputs if output.seq_id == "bad"]
    assert (
        refusal.error is not None and refusal.error.param == param and refusal.error.status == 400
    )
    good = [
        token_id for output in outputs if output.seq_id == "good" for token_id in output.token_ids
    ]
    assert good == expected_completion([1, 2, 3], 5)


def test_a_preempted_sequence_comes_back_before_those_behind_it() -> None:
    engine, runner = make_engine(num_blocks=10, block_size=4, max_num_seqs=2)
    for seq_id in ("a", "b", "c"):
        engine.add(addition(seq_id, [ord(seq_id) % VOCAB], 1 if seq_id == "c" else 32))
    known: set[str] = set()
    while engine.busy:
        preemptions = engine.stats().num_preemptions
        engine.step()
        planned = {seq_id for seq_id, _ in runner.plans[-1]}
        if engine.stats().num_preemptions > preemptions:
            assert planned <= known
        known |= planned
    assert engine.stats().num_preemptions > 0
    steps = {
        name: [place for place, plan in enumerate(runner.plans) if name in dict(plan)]
        for name in "bc"
    }
    away, back = next(pair for pair in pairwise(steps["b"]) if pair[1] > pair[0] + 1)
    assert away < back <= steps["c"][0]


def test_the_tail_of_a_prefix_is_forgotten_before_its_head() -> None:
    engine, _ = make_engine(num_blocks=8, block_size=4)
    stem = list(range(13))  # three full blocks and a blank one
    run_to_end(engine, [addition("a", stem, 1)])
    run_to_end(engine, [addition("b", [50 + n for n in range(21)], 1)])  # takes six: one is a's
    before = engine.stats().cached_tokens
    run_to_end(engine, [addition("a again", stem, 1)])
    assert engine.stats().cached_tokens == before + 8


def test_a_cancelled_sequence_is_in_no_further_step_and_its_blocks_are_free() -> None:
    engine, runner = make_engine(num_blocks=64, block_size=4, budget=8)
    for name in ("decoding", "other", "in its prompt", "waiting"):
        engine.add(addition(name, [1] * (60 if "prompt" in name else 3), 30))
    stepped(engine, 4)
    held = engine.scheduler.pool.num_held
    for name in ("decoding", "in its prompt", "waiting"):
        engine.cancel(name)
        engine.step()
        assert name not in dict(runner.plans[-1])
    assert engine.scheduler.pool.num_held < held
    assert running(engine) == ["other"]
    assert engine.scheduler.pool.num_held == len(engine.scheduler.running[0].block_table)

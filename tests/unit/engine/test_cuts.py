"""What is excluded from a draw, against transformers and against the rules as their papers say."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from penstock.worker.engine.sampling.cuts import CutRow, Cuts
from penstock.worker.engine.sampling.dry import DryTokens
from penstock.worker.engine.sampling.sampler import NO_TOKEN, Sampler
from penstock.worker.engine.sampling.sampler_row import SamplerRow

CPU = torch.device("cpu")
VOCAB = 500


def some_logits(rows: int, spread: float, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def kept(logits: Tensor, params: SamplingParams, seeds: list[int] | None = None) -> list[set[int]]:
    rows = [CutRow(place, params, seeds[place] if seeds else 0, 0) for place in range(len(logits))]
    logits = logits.clone()
    Cuts(rows, logits.shape[1], CPU).exclude(logits, np.zeros(len(rows), np.int64))
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in logits]


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("mass", [0.05, 0.5, 0.95, 0.9999])
@pytest.mark.parametrize("temperature, top_k, top_p", [(1.0, 0, 1.0), (0.6, 60, 0.9)])
def test_typical_p_keeps_what_transformers_does(
    spread: float, mass: float, temperature: float, top_k: int, top_p: float
) -> None:
    logits = some_logits(60, spread)
    logits[:5, 40:] = -torch.inf  # a grammar's
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers += [TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)]
    warped = LogitsProcessorList([*warpers, TypicalLogitsWarper(mass)])(
        torch.zeros(len(logits), 1, dtype=torch.int64), logits.double()
    )
    wanted = [set(row.isfinite().nonzero()[:, 0].tolist()) for row in warped]
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, typical_p=mass)
    assert kept(logits, params) == wanted


def probabilities(row: Tensor) -> list[float]:
    return [float(each) for each in row.double().softmax(-1)]


def by_top_a(row: Tensor, top_a: float) -> set[int]:
    chances = probabilities(row)
    limit = top_a * max(chances) ** 2
    return {token for token, chance in enumerate(chances) if chance >= limit}


def by_sigmas(row: Tensor, sigmas: float) -> set[int]:
    values = [value for value in row.double().tolist() if math.isfinite(value)]
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    limit = max(values) - sigmas * deviation
    return {token for token, value in enumerate(row.double().tolist()) if value >= limit}


def by_xtc(row: Tensor, threshold: float) -> set[int]:
    chances = dict(enumerate(probabilities(row)))
    never = max(chances.values()) * 2**-40  # in the draw's units less than 1
    chances = {token: chance for token, chance in chances.items() if chance > never}
    likely = [token for token, chance in chances.items() if chance >= threshold]
    return chances.keys() - sorted(likely, key=chances.__getitem__)[1:]


RULES: dict[str, tuple[dict[str, float], Callable[[Tensor], set[int]]]] = {
    "top_a": ({"top_a": 0.2}, lambda row: by_top_a(row, 0.2)),
    "a whole top_a": ({"top_a": 1}, lambda row: by_top_a(row, 1)),
    "one sigma": ({"top_n_sigma": 1}, lambda row: by_sigmas(row, 1)),
    "three sigmas": ({"top_n_sigma": 3}, lambda row: by_sigmas(row, 3)),
    "xtc": (
        {"xtc_probability": 1, "xtc_threshold": 0.02},
        lambda row: by_xtc(row, 0.02),
    ),
    "xtc of all": ({"xtc_probability": 1, "xtc_threshold": 0}, lambda row: by_xtc(row, 0)),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
def test_what_a_rule_keeps(rule: str, spread: float) -> None:
    fields, keeps = RULES[rule]
    logits = some_logits(50, spread, seed=3)
    logits[:5, 40:] = -torch.inf
    found = kept(logits, SamplingParams.model_validate(fields))
    assert found == [keeps(row) for row in logits]


def test_xtc_excludes_as_often_as_it_is_asked_and_alike_for_the_same_seed() -> None:
    logits = torch.zeros(1000, 4)
    logits[:, 0] = 1
    params = SamplingParams(xtc_probability=0.3, xtc_threshold=0.1)
    found = kept(logits, params, [*range(1000)])
    fired = sum(each == {1, 2, 3} for each in found)
    assert 250 < fired < 350
    assert all(each in ({1, 2, 3}, {0, 1, 2, 3}) for each in found)
    assert kept(logits, params, [*range(1000)]) == found


def test_xtc_looks_at_what_the_other_rules_keep() -> None:
    row = torch.tensor([[0.5, 0.25, 0.13, 0.12]]).log()
    params = SamplingParams(top_k=2, xtc_probability=1, xtc_threshold=0.3)
    # of the two that are kept the second has a third
    assert kept(row, params) == [{1}]
    assert kept(row, params.model_copy(update={"top_k": 3})) == [{0, 1, 2}]


def test_the_likeliest_is_drawn_whatever_is_excluded_at_temperature_0() -> None:
    params = SamplingParams(temperature=0, typical_p=0.1, xtc_probability=1, top_n_sigma=1)
    logits = some_logits(20, 3.0)
    rows = [SamplerRow(params, seed, 0, [1, 2], 1) for seed in range(20)]
    made = Sampler(VOCAB, frozenset({2})).sample(logits.clone(), rows)
    assert made.token_ids == logits.argmax(-1).tolist()


def test_draws_are_from_what_is_kept_in_its_proportions() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    params = SamplingParams(xtc_probability=1, xtc_threshold=0.25)  # excludes the first
    rows = [SamplerRow(params, seed, 0, [1, 2], 1) for seed in range(6000)]
    made = Sampler(4, frozenset({2})).sample(logits.repeat(6000, 1), rows)
    shares = [made.token_ids.count(token) / 6000 for token in range(4)]
    assert shares == pytest.approx([0, 0.5, 1 / 3, 1 / 6], abs=0.02)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_no_number_still_ends(bad: float) -> None:
    params = SamplingParams(
        top_n_sigma=1, top_a=0.5, typical_p=0.5, xtc_probability=1, top_k=5, top_p=0.5
    )
    rows = [SamplerRow(params, seed, 0, [1, 2], 1) for seed in range(3)]
    logits = some_logits(3, 1.0)
    logits[1, 7] = bad
    made = Sampler(VOCAB, frozenset({2})).sample(logits, rows)
    assert made.token_ids[1] == NO_TOKEN
    assert NO_TOKEN not in (made.token_ids[0], made.token_ids[2])


def losses_by_rule(ids: list[int], params: SamplingParams, breakers: set[int]) -> dict[int, float]:
    """Return what each token loses: every earlier end is compared, token by token."""
    last = params.dry_penalty_last_n
    ids = ids if last < 0 else ids[len(ids) - min(last, len(ids)) :]
    lengths: dict[int, int] = {}
    for end in range(len(ids) - 1):
        length = 0
        while (
            length <= end
            and ids[end - length] == ids[-1 - length]
            and ids[-1 - length] not in breakers
        ):
            length += 1
        token = ids[end + 1]
        lengths[token] = max(length, lengths.get(token, 0))
    return {
        token: params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
        for token, length in lengths.items()
        if length >= params.dry_allowed_length and token not in breakers
    }


def test_dry_takes_from_each_token_what_the_rule_says() -> None:
    rng = random.Random(5)
    for _ in range(300):
        ids = [rng.randrange(rng.choice([2, 4, 12])) for _ in range(rng.randrange(1, 90))]
        breakers = {token for token in range(12) if rng.random() < 0.15}
        params = SamplingParams(
            temperature=0,
            dry_multiplier=rng.choice([0.5, 0.8]),
            dry_base=rng.choice([1, 1.3, 1.75]),
            dry_allowed_length=rng.choice([1, 2, 4]),
            dry_penalty_last_n=rng.choice([-1, -1, 0, 1, 20]),
        )
        begin = rng.randrange(1, len(ids) + 1)
        grown = ids[:begin]
        dry = DryTokens(params, grown, frozenset(breakers))
        for token in ids[begin:]:  # as the sequence grows
            dry.losses()
            grown.append(token)
        tokens, losses = dry.losses()
        found = dict(zip(tokens.tolist(), losses.tolist(), strict=True))
        assert found == pytest.approx(losses_by_rule(ids, params, breakers), rel=1e-6)


def test_what_dry_takes_changes_the_draw() -> None:
    params = SamplingParams(temperature=0, dry_multiplier=1, dry_allowed_length=2)
    row = SamplerRow(params, 0, 0, [5, 6, 7, 8, 5, 6], 3)
    logits = torch.zeros(2, 10)
    logits[:, 7], logits[:, 9] = 0.9, 0.5
    other = SamplerRow(params, 0, 0, [5, 6, 7, 8, 5, 9], 3)
    assert Sampler(10, frozenset({2})).sample(logits, [row, other]).token_ids == [9, 7]


def test_a_rule_sees_only_what_a_grammar_allows() -> None:
    form = StructuredOutputs(regex="a*")
    params = SamplingParams(xtc_probability=1, xtc_threshold=0.28, structured_outputs=form)
    logits = torch.tensor([[0.4, 0.3, 0.15, 0.15]]).log()
    masks = torch.tensor([[0b1101]], dtype=torch.int32)
    rows = [SamplerRow(params, 0, 0, [1, 2], 1)]
    # The second is forbidden, so that the first is the only one above the threshold, and stays.
    drawn = set()
    for length in range(2, 60):
        made = Sampler(4, frozenset({2})).sample(
            logits.clone(), rows, masks.clone(), np.array([length])
        )
        drawn |= set(made.token_ids)
    assert drawn == {0, 2, 3}

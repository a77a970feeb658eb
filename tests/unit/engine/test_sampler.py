"""What is drawn from logits, against transformers, plain arithmetic, and itself elsewhere."""

import math
import random
from collections import Counter
from typing import TypedDict

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.kernels.sampling.draw import Cut, draw, draw_cut
from penstock.kernels.sampling.philox import key_schedule, philox, uniforms
from penstock.kernels.sampling.token_mask import allow_all_but
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from penstock.worker.engine.io.messages import WordIds
from penstock.worker.engine.sampling.sampler import NO_TOKEN, Sampler
from penstock.worker.engine.sampling.sampler_row import SamplerRow

EOS = 2
SOME_FORM = StructuredOutputs(regex="a*")


def row(params: SamplingParams, completion: list[int] | None = None, seed: int = 0) -> SamplerRow:
    prompt = [5, 6, 7]
    return SamplerRow(params, seed, 0, prompt + (completion or []), len(prompt))


def sampler(vocab: int) -> Sampler:
    return Sampler(vocab, frozenset({EOS}))


def random_logits(rows: int, vocab: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


# Known answers of the Random123 library, kat_vectors, philox4x32 with 10 rounds.
@pytest.mark.parametrize(
    "counter, key, answer",
    [
        ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter: list[int], key: int, answer: list[int]) -> None:
    words = philox(key_schedule([key, key]), np.array([counter, counter], np.uint64).T)
    assert words.T.tolist() == [answer, answer]


def test_every_seed_choice_and_position_has_its_own_number() -> None:
    places = [
        (seed, choice, position)
        for seed in (0, 1, -1, 2**32, 2**62, -(2**63))
        for choice in (0, 1, 15)
        for position in range(200)
    ]
    seeds, choices, positions = (list(column) for column in zip(*places, strict=True))
    numbers = uniforms(key_schedule(seeds), choices, positions)
    assert len(set(numbers.tolist())) == len(places)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02
    assert uniforms(key_schedule([2**32]), [15], [7])[0] == numbers[places.index((2**32, 15, 7))]


def test_the_counter_is_choice_then_position() -> None:
    keys = key_schedule([9])
    words = philox(keys, np.array([[3], [5], [0], [0]], np.uint64))
    number = ((int(words[0, 0]) >> 5) * 2**26 + (int(words[1, 0]) >> 6)) / 2**53
    assert uniforms(keys, [3], [5])[0] == number


class Cuts(TypedDict, total=False):
    top_k: int
    top_p: float
    min_p: float


def kept_by_transformers(logits: Tensor, temperature: float, cuts: Cuts) -> Tensor:
    """Probabilities [rows, vocab] after transformers' warpers, in vLLM's order, in float64."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if "min_p" in cuts:
        warpers.append(MinPLogitsWarper(cuts["min_p"]))
    if "top_k" in cuts:
        warpers.append(TopKLogitsWarper(cuts["top_k"]))
    if "top_p" in cuts:
        warpers.append(TopPLogitsWarper(cuts["top_p"]))
    ids = torch.LongTensor([[0]] * len(logits))
    warped: Tensor = warpers(ids, logits.double())
    return warped.softmax(-1)


@pytest.mark.parametrize("rows, vocab, spread", [(1000, 300, 3.0), (12, 6000, 0.7), (60, 41, 2.0)])
@pytest.mark.parametrize(
    "cuts",
    [
        Cuts(),
        Cuts(top_k=20),
        Cuts(top_p=0.9),
        Cuts(min_p=0.02),
        Cuts(top_k=40, top_p=0.8, min_p=0.01),
        Cuts(top_p=0.5, min_p=0.001),
        Cuts(top_k=5000, top_p=0.99),
    ],
    ids=str,
)
def test_the_middle_of_each_kept_tokens_share_draws_that_token(
    rows: int, vocab: int, spread: float, cuts: Cuts
) -> None:
    logits = random_logits(rows, vocab, spread)
    shares = kept_by_transformers(logits, 0.8, cuts)
    middles = shares.cumsum(-1) - shares / 2
    asked = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(2)) < 40 / vocab
    rarest = torch.where(shares > 1e-7, shares, 2).topk(3, largest=False).indices
    asked = asked.scatter(1, rarest, True) & (shares > 1e-7)
    row_ids, token_ids = asked.nonzero(as_tuple=True)
    count = len(row_ids)
    temperature, places = torch.full((count,), 0.8), middles[row_ids, token_ids]
    if not cuts:
        found = draw(logits[row_ids], temperature, places)
    else:
        cut = Cut(
            torch.full((count,), min(cuts.get("top_k", vocab), vocab)),
            torch.full((count,), cuts.get("top_p", 1.0), dtype=torch.float64),
            torch.full((count,), cuts.get("min_p", 0.0), dtype=torch.float64),
        )
        found = draw_cut(logits[row_ids], temperature, cut, places)
    wrong = (found != token_ids).nonzero()[:, 0]
    assert [(int(row_ids[i]), int(token_ids[i]), int(found[i])) for i in wrong[:5]] == []


@pytest.mark.parametrize("top_k, top_p", [(3, 1.0), (500, 0.1), (350, 0.5)])
def test_equal_logits_are_all_kept_or_none(top_k: int, top_p: float) -> None:
    logits = torch.zeros(1, 500)
    logits[0, 100:400] = 2.0  # 300 equal ones, more than the first widths look at
    places = torch.linspace(0, 0.9999, 1200, dtype=torch.float64)
    cut = Cut(
        torch.full((1200,), top_k),
        torch.full((1200,), top_p, dtype=torch.float64),
        torch.zeros(1200, dtype=torch.float64),
    )
    drawn = draw_cut(logits.expand(1200, -1), torch.ones(1200), cut, places)
    assert set(drawn.tolist()) == set(range(100, 400))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_p=0.9),
        SamplingParams(top_k=6, min_p=0.05),
    ],
    ids=str,
)
def test_twenty_thousand_draws_follow_the_distribution(params: SamplingParams) -> None:
    vocab, rows, steps = 24, 400, 50
    logits = random_logits(1, vocab, 1.5, seed=1)
    batch = [row(params, seed=seed) for seed in range(rows)]
    drawer, counts = sampler(vocab), torch.zeros(vocab, dtype=torch.float64)
    for _ in range(steps):
        tokens = drawer.sample(logits.expand(rows, -1).clone(), batch).token_ids
        for each, token in zip(batch, tokens, strict=True):
            counts[token] += 1
            each.token_ids.append(token)
    cuts = Cuts()
    if params.top_k:
        cuts["top_k"], cuts["min_p"] = params.top_k, params.min_p
    if params.top_p < 1:
        cuts["top_p"] = params.top_p
    expected = kept_by_transformers(logits, params.temperature, cuts)[0] * rows * steps
    live = expected > 0
    assert not counts[~live].any()
    statistic = ((counts - expected)[live].square() / expected[live]).sum()
    degrees = torch.tensor((int(live.sum()) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(degrees, statistic / 2) > 0.001


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_only_allowed_tokens_are_drawn_and_log_probabilities_are_the_models(
    temperature: float,
) -> None:
    vocab, allowed = 50, [7, 11, 13]
    params = SamplingParams(temperature=temperature, allowed_token_ids=allowed, logprobs=0)
    rows = [row(params, seed=seed) for seed in range(60)] + [row(SamplingParams(), seed=1)]
    logits = random_logits(61, vocab, seed=5)
    wanted = logits.log_softmax(-1)
    made = sampler(vocab).sample(logits.clone(), rows)
    drawn = set(made.token_ids[:-1])
    assert drawn == set(allowed)
    if temperature == 0:
        best = logits[:60, allowed].argmax(-1)
        assert made.token_ids[:-1] == [allowed[place] for place in best]
    for at, told in enumerate(made.logprobs[:-1]):
        assert told is not None
        assert told.logprob == pytest.approx(float(wanted[at, told.token_id]), abs=1e-5)
    alone = sampler(vocab).sample(logits[60:].clone(), rows[60:])
    assert alone.token_ids == made.token_ids[60:]


def test_no_completion_has_a_bad_word_and_all_else_is_as_it_was() -> None:
    """Against transformers' processor of the same name, on a model that loves the words."""
    vocab, words = 12, [[3], [5, 6], [7, 8, 7], [1, 1]]
    banned = NoBadWordsLogitsProcessor(words)
    rows = [
        SamplerRow(SamplingParams(temperature=t, max_tokens=99), t, 0, [5, 6, 7], 3, WordIds(words))
        for t in range(2)
    ]
    drawer, rng = sampler(vocab), random.Random(4)
    for step in range(300):
        logits = random_logits(2, vocab, 2.0, seed=rng.randrange(10**6))
        made = drawer.sample(logits.clone(), rows).token_ids
        completion = torch.tensor([rows[0].token_ids[rows[0].num_prompt :]], dtype=torch.int64)
        wanted = banned(completion, logits[:1].clone()) if step else logits[:1].clone()
        if not step:
            wanted[0, 3] = -torch.inf
        assert made[0] == int(wanted.argmax())
        for each, token in zip(rows, made, strict=True):
            each.token_ids.append(token)
    for each in rows:
        text = each.token_ids[each.num_prompt :]
        for word in words:
            assert all(text[at : at + len(word)] != word for at in range(len(text)))
        assert {5, 6, 7, 8, 1} <= set(text)


NAMED = {"logprobs": 5, "logprob_token_ids": [30, 2, 11]}


def random_params(rng: random.Random, allows_all: bool = True) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0, 0, 0.3, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 5, 70, 4000]),
        top_p=rng.choice([1.0, 1.0, 0.2, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        top_n_sigma=rng.choice([0, 0, 1.0]),
        top_a=rng.choice([0, 0, 0.3]),
        typical_p=rng.choice([1, 1, 0.6]),
        xtc_probability=rng.choice([0, 0, 0.5, 1]),
        dry_multiplier=rng.choice([0, 0, 0.8]),
        presence_penalty=rng.choice([0, 0, 1.5]),
        frequency_penalty=rng.choice([0, 0, -0.7]),
        repetition_penalty=rng.choice([1, 1, 1.3]),
        logit_bias=rng.choice([{}, {}, {3: 4.5, 8: -100}]),
        min_tokens=rng.choice([0, 0, 4]),
        max_tokens=100,
        stop_token_ids=rng.choice([[], [4, 9]]),
        allowed_token_ids=None if allows_all else rng.choice([None, [3, 4, 7, 8, 9, 30]]),
        **rng.choice([{}, {}, {"logprobs": 0}, {"logprobs": 3}, {"logprobs": 20}, NAMED]),
    )


def random_rows(
    rng: random.Random, count: int, vocab: int, allows_all: bool = True
) -> list[SamplerRow]:
    rows = []
    for _ in range(count):
        ids = [rng.randrange(vocab) for _ in range(rng.randrange(2, 40))]
        num_prompt = rng.randrange(1, len(ids))
        params = random_params(rng, allows_all)
        seed, choice = rng.randrange(2**63), rng.randrange(4)
        rows.append(SamplerRow(params, seed, choice, ids, num_prompt))
    return rows


@pytest.mark.parametrize("seed, vocab", [(0, 1000), (1, 1000), (2, 37), (3, 6144)])
def test_a_row_gets_the_same_alone_and_in_any_batch(seed: int, vocab: int) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng, 48, vocab, allows_all=False)
    logits = random_logits(48, vocab, seed=seed)
    logits[::3] = (logits[::3] * 2).round() / 2  # ties, as low precision gives them
    drawer = sampler(vocab)
    alone = [drawer.sample(logits[i : i + 1].clone(), [each]) for i, each in enumerate(rows)]
    for _ in range(3):
        order = rng.sample(range(48), rng.randrange(2, 49))
        together = drawer.sample(logits[order], [rows[i] for i in order])
        assert together.token_ids == [alone[i].token_ids[0] for i in order]
        assert together.logprobs == [alone[i].logprobs[0] for i in order]


def forgetful_logits(rows: list[SamplerRow], vocab: int) -> Tensor:
    """Of a model that reads nothing but the last two tokens."""
    seeds = [each.token_ids[-1] * vocab + each.token_ids[-2] for each in rows]
    return torch.cat([random_logits(1, vocab, seed=seed) for seed in seeds])


def continued(drawer: Sampler, rows: list[SamplerRow], steps: int, vocab: int) -> None:
    for _ in range(steps):
        tokens = drawer.sample(forgetful_logits(rows, vocab), rows).token_ids
        for each, token in zip(rows, tokens, strict=True):
            each.token_ids.append(token)


def test_a_sequence_rebuilt_from_its_ids_goes_on_with_the_same_tokens() -> None:
    vocab, steps = 60, 100  # long enough for the counts to outgrow their first room
    rng = random.Random(4)
    rows = random_rows(rng, 16, vocab)
    starts = [len(each.token_ids) for each in rows]
    drawer = sampler(vocab)
    continued(drawer, rows, steps, vocab)
    for cut in (0, 1, 3, 4, 50, 99):
        rebuilt = [
            SamplerRow(x.params, x.seed, x.choice, x.token_ids[: start + cut], x.num_prompt)
            for x, start in zip(rows, starts, strict=True)
        ]
        rng.shuffle(order := list(range(16)))
        continued(sampler(vocab), [rebuilt[i] for i in order], steps - cut, vocab)
        assert [each.token_ids for each in rebuilt] == [each.token_ids for each in rows]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("whole", [True, False])
def test_a_row_that_is_no_number_ends_alone(bad: float, whole: bool) -> None:
    rng = random.Random(5)
    rows, logits = random_rows(rng, 40, 500), random_logits(40, 500)
    expected = sampler(500).sample(logits.clone(), rows)
    broken = [0, 7, 21, 39]
    for i in broken:
        logits[i, slice(None) if whole else 77] = bad
    found = sampler(500).sample(logits, rows)
    for i in range(40):
        if i in broken:
            assert (found.token_ids[i], found.logprobs[i]) == (NO_TOKEN, None)
        else:
            assert found.token_ids[i] == expected.token_ids[i]
            assert found.logprobs[i] == expected.logprobs[i]


def test_a_log_probability_that_is_no_number_ends_its_row() -> None:
    logits = random_logits(1, 50)
    logits[0, EOS] = math.nan  # forbidden, so the draw itself does not meet it
    params = SamplingParams(min_tokens=3, max_tokens=9, logprobs=2)
    found = sampler(50).sample(logits, [row(params)])
    assert (found.token_ids, found.logprobs) == ([NO_TOKEN], [None])


def test_a_row_that_may_be_nothing_ends_and_one_that_may_be_one_thing_is_that() -> None:
    rows = random_rows(random.Random(6), 40, 500)
    logits = torch.full((40, 500), -torch.inf)
    logits[1:, 123] = -1e4
    found = sampler(500).sample(logits, rows)
    assert found.token_ids == [NO_TOKEN] + [123] * 39
    alternatives = [each.top_logprobs for each in found.logprobs if each is not None]
    assert all(-9999 <= logprob <= 0 for each in alternatives for logprob in each)


@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 1e-4])
def test_the_smallest_temperatures_give_the_likeliest(temperature: float) -> None:
    logits = random_logits(20, 400)
    rows = [row(SamplingParams(temperature=temperature, top_p=p)) for p in (1.0, 0.9) * 10]
    assert sampler(400).sample(logits.clone(), rows).token_ids == logits.argmax(-1).tolist()


def test_the_first_of_equal_logits_is_the_likeliest() -> None:
    logits = torch.zeros(3, 1024)
    logits[0, [700, 3, 512]] = 1
    logits[1, [1023, 513]] = 1
    greedy = row(SamplingParams(temperature=0))
    assert sampler(1024).sample(logits, [greedy] * 3).token_ids == [3, 513, 0]


def test_a_bias_forces_and_bans() -> None:
    logits = random_logits(100, 300, 5)
    logits[:, 17] = 25
    force = row(SamplingParams(temperature=2, logit_bias={250: 100}))
    ban = row(SamplingParams(temperature=2, logit_bias={17: -100}))
    drawer = sampler(300)
    forced = drawer.sample(logits.clone(), [row(force.params, seed=i) for i in range(100)])
    assert set(forced.token_ids) == {250}
    banned = drawer.sample(logits.clone(), [row(ban.params, seed=i) for i in range(100)])
    assert 17 not in banned.token_ids


def test_a_bias_adds_to_the_logits_of_its_row() -> None:
    logits = random_logits(3, 50)
    before = logits.clone()
    biased = SamplingParams(temperature=0, logit_bias={4: 1.5, 49: -2})
    sampler(50).sample(logits, [row(SamplingParams(temperature=0)), row(biased), row(biased)])
    before[1:, 4] += 1.5
    before[1:, 49] -= 2
    torch.testing.assert_close(logits, before, rtol=0, atol=0)


def test_the_repetition_penalty_is_transformers() -> None:
    logits, rng = random_logits(30, 200), random.Random(7)
    rows = [
        SamplerRow(SamplingParams(temperature=0, repetition_penalty=penalty), 0, 0, ids, 5)
        for penalty in (0.5, 1.2, 3.0)
        for ids in ([rng.randrange(200) for _ in range(30)] for _ in range(10))
    ]
    expected = torch.cat(
        [
            RepetitionPenaltyLogitsProcessor(each.params.repetition_penalty)(
                torch.tensor([each.token_ids]), logits[i : i + 1]
            )
            for i, each in enumerate(rows)
        ]
    )
    sampler(200).sample(logits, rows)
    torch.testing.assert_close(logits, expected)


def test_frequency_and_presence_count_the_completion_alone_as_it_grows() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=0.5, presence_penalty=-1.25)
    each = SamplerRow(params, 0, 0, [1, 1, 2, 9], 3)
    drawer = sampler(200)
    for token in (9, 9, 1, *range(100, 180)):
        logits = random_logits(1, 200, seed=token)
        expected = logits.clone()
        for seen, count in Counter(each.token_ids[3:]).items():
            expected[0, seen] -= 0.5 * count - 1.25
        drawer.sample(logits, [each])
        torch.testing.assert_close(logits, expected)
        each.token_ids.append(token)


def test_presence_spares_what_only_the_prompt_holds() -> None:
    logits = torch.zeros(1, 40)
    logits[0, 5], logits[0, 9] = 10.0, 4.9  # 5 is in the prompt, and is halved to 5.0
    params = SamplingParams(temperature=0, repetition_penalty=2, presence_penalty=2)
    assert sampler(40).sample(logits, [row(params)]).token_ids == [5]


def test_the_choices_of_one_job_draw_apart() -> None:
    rows = [SamplerRow(SamplingParams(), 7, choice, [5, 6], 2) for choice in range(8)]
    drawn = sampler(1000).sample(torch.zeros(8, 1000), rows).token_ids
    assert len(set(drawn)) >= 6


def test_no_end_is_drawn_before_min_tokens() -> None:
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[8], max_tokens=9)
    logits = random_logits(1, 40)
    logits[0, [EOS, 8, 30]] = torch.tensor([50.0, 40.0, 30.0])
    drawn = [
        sampler(40).sample(logits.clone(), [row(params, [11] * done)]).token_ids[0]
        for done in range(5)
    ]
    assert drawn == [30, 30, 30, EOS, EOS]
    on = SamplingParams(**params.model_dump(exclude_defaults=True) | {"ignore_eos": True})
    assert sampler(40).sample(logits.clone(), [row(on)]).token_ids == [EOS]


@pytest.mark.parametrize("vocab", [64, 45, 1001])
def test_a_mask_binds_the_rows_that_have_a_form_and_no_other(vocab: int) -> None:
    rng, rows = random.Random(8), 60
    logits = random_logits(rows, vocab)
    allowed = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(1)) < 0.1
    allowed[:, 31] = True  # the sign bit
    forbidden = [(~line).nonzero()[:, 0].tolist() for line in allowed]
    masks = torch.stack([allow_all_but(ids, vocab) for ids in forbidden])
    batch = [
        row(SamplingParams(temperature=rng.choice([0, 1]), structured_outputs=form), seed=i)
        for i, form in enumerate([SOME_FORM, None, SOME_FORM] * 20)
    ]
    changed = logits.clone()
    sampler(vocab).sample(changed, batch, masks)
    bound = torch.tensor([True, False, True] * 20)
    expected = torch.where(allowed | ~bound[:, None], logits, -torch.inf)
    torch.testing.assert_close(changed, expected, rtol=0, atol=0)


def test_a_form_that_is_over_ends_before_min_tokens() -> None:
    vocab = 70
    params = SamplingParams(temperature=0, min_tokens=5, structured_outputs=SOME_FORM)
    only_eos = allow_all_but([token for token in range(vocab) if token != EOS], vocab)
    eos_or_60 = allow_all_but([token for token in range(vocab) if token not in (EOS, 60)], vocab)
    logits = random_logits(3, vocab)
    logits[:, EOS] = 50
    rows = [row(SamplingParams(temperature=0)), row(params), row(params)]
    masks = torch.stack([only_eos, only_eos, eos_or_60])
    assert sampler(vocab).sample(logits, rows, masks).token_ids == [EOS, EOS, 60]


def test_logprobs_are_of_the_logits_that_the_model_gave() -> None:
    logits = random_logits(40, 3000, 4)
    expected = logits.double().log_softmax(-1)
    params = [
        SamplingParams(temperature=t, logprobs=count, presence_penalty=2, logit_bias={9: 30})
        for t in (0, 0.5)
        for count in (0, 1, 5, 20)
    ] * 5
    found = sampler(3000).sample(logits, [row(each, [1, 2, 3]) for each in params])
    for i, (token, logprob) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
        assert logprob is not None and logprob.token_id == token
        top, top_ids = expected[i].topk(params[i].logprobs or 0)
        assert logprob.top_ids == top_ids.tolist()
        assert logprob.top_logprobs == pytest.approx(top.tolist(), abs=1e-5)
        assert logprob.logprob == pytest.approx(float(expected[i, token]), abs=1e-5)


def test_tokens_that_are_named_are_told_in_place_of_the_likeliest() -> None:
    logits = random_logits(30, 3000, 4)
    expected = logits.double().log_softmax(-1)
    named = [[7], [2999, 0, 5, 5], [*range(128)]]
    params = [
        SamplingParams(temperature=t, logprobs=count, logprob_token_ids=ids, logit_bias={9: 30})
        for t in (0, 2)
        for count in (0, 20)
        for ids in (*named, None)
    ]
    found = sampler(3000).sample(logits[: len(params)], [row(each) for each in params])
    for i, (token, told) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
        ids = params[i].logprob_token_ids
        assert told is not None and told.token_id == token
        assert told.logprob == pytest.approx(float(expected[i, token]), abs=1e-5)
        of_it = expected[i, told.top_ids].tolist()
        assert told.top_logprobs == pytest.approx(of_it, abs=1e-5)
        if ids is None:
            assert told.top_ids == expected[i].topk(params[i].logprobs or 0)[1].tolist()
            continue
        assert sorted(told.top_ids) == sorted({*ids, token})
        assert told.top_logprobs == sorted(told.top_logprobs, reverse=True)


def test_alternatives_of_equal_logits_come_in_order_of_their_ids() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 6] = 1
    (found,) = sampler(10).sample(logits, [row(SamplingParams(temperature=0, logprobs=4))]).logprobs
    assert found is not None and found.top_ids == [6, 0, 1, 2]

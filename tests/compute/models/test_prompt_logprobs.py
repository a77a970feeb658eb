"""Log probabilities of prompts against transformers, of an engine that is short of everything."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import judges
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.messages import AddSequence, Logprob, Output
from penstock.worker.engine.running import prompt_scores
from short_engine import make_engine

TOLERANCE = 1e-4
STEM = judges.prompt(48, seed=1)
ASKED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=3)
USUAL = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "mistral_window"])
def judge(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, judges.save(request.param, folder)


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scores, "_LOGITS", 7 * judges.VOCAB + 3)


def run(engine: Engine, trace: list[AddSequence]) -> dict[str, list[Output]]:
    for addition in trace:
        engine.add(addition)
    made: dict[str, list[Output]] = {addition.seq_id: [] for addition in trace}
    while engine.busy:
        for output in engine.step():
            assert output.error is None
            made[output.seq_id].append(output)
    return made


def scores_of(outputs: list[Output]) -> list[Logprob]:
    """Those of a prompt, which come once, with the first token."""
    first, *others = outputs
    assert first.prompt_logprobs is not None and len(first.token_ids) == 1
    assert all(other.prompt_logprobs is None for other in others)
    return first.prompt_logprobs


@torch.inference_mode()
def assert_as_transformers_says(
    model: PreTrainedModel, prompt: list[int], scores: list[Logprob], num_top: int
) -> None:
    expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    assert [each.token_id for each in scores] == prompt[1:]
    for row, each in zip(expected, scores, strict=True):
        assert each.logprob == pytest.approx(float(row[each.token_id]), abs=TOLERANCE)
        likely = row.topk(num_top).values.tolist()
        assert each.top_logprobs == pytest.approx(likely, abs=TOLERANCE)
        assert row[each.top_ids].tolist() == pytest.approx(likely, abs=TOLERANCE)


def mixed_trace() -> Iterator[AddSequence]:
    """Half of them ask, with none or three alternatives; many share a stem; one has one token."""
    for number in range(32):
        prompt = judges.prompt(judges.PROMPT_LENGTHS[number % 7], seed=number)
        if number % 3 == 0:
            prompt = STEM + prompt[:20]
        params = USUAL
        if number % 2:
            params = ASKED.model_copy(update={"prompt_logprobs": 3 if number % 4 == 1 else 0})
        yield AddSequence(str(number), prompt, params)
    yield AddSequence("of one token", [5], ASKED)


def test_they_equal_transformers_also_of_prompts_that_are_known_or_preempted(
    judge: tuple[Path, PreTrainedModel],
) -> None:
    folder, model = judge
    engine, trace = make_engine(folder), list(mixed_trace())
    run(engine, [AddSequence("stem", [*STEM, 5], USUAL)])
    made = run(engine, trace)
    preempted = engine.stats().num_preemptions
    assert preempted > 0  # else it proved less than it says
    for addition in trace:
        num_top = addition.params.prompt_logprobs
        if num_top is None:
            assert all(each.prompt_logprobs is None for each in made[addition.seq_id])
        else:
            scores = scores_of(made[addition.seq_id])
            assert_as_transformers_says(model, addition.prompt, scores, num_top)


def test_a_prompt_preempted_amid_them_begins_where_they_end(
    judge: tuple[Path, PreTrainedModel],
) -> None:
    """Its first blocks are found again, but no token whose scores are still to be made."""
    folder, model = judge
    engine, prompt = make_engine(folder, max_num_batched_tokens=20), judges.prompt(100, seed=9)
    engine.add(AddSequence("0", prompt, ASKED))
    assert engine.step() == engine.step() == []
    (seq,) = engine.scheduler.running
    engine.scheduler._preempt(seq)
    outputs: list[Output] = []
    while engine.busy:
        outputs += engine.step()
    assert seq.num_prefix == 32  # 40 tokens were computed, in blocks of 16
    assert_as_transformers_says(model, prompt, scores_of(outputs), 3)


def test_one_that_goes_on_elsewhere_has_given_them(judge: tuple[Path, PreTrainedModel]) -> None:
    engine = make_engine(judge[0])
    addition = AddSequence("0", STEM, ASKED)
    (whole,) = run(engine, [addition]).values()
    (rest,) = run(engine, [replace(addition, completion=whole[0].token_ids)]).values()
    assert [each.token_ids for each in rest] == [each.token_ids for each in whole[1:]]
    assert all(each.prompt_logprobs is None for each in rest)


def test_the_prefix_that_they_compute_is_found_by_others(
    judge: tuple[Path, PreTrainedModel],
) -> None:
    engine = make_engine(judge[0])
    run(engine, [AddSequence("0", [*STEM, 5], ASKED)])
    (outputs,) = run(engine, [AddSequence("1", [*STEM, 6], USUAL)]).values()
    assert outputs[0].num_cached == len(STEM)

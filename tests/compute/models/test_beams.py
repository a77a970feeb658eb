"""Beam search against transformers' own, under every shortage that the engine may have."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import families
import judges
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.build import build_engine
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.engine.io.messages import AddSequence, Output

FAMILIES = ("deepseek_v3", "qwen3_next", "gpt_oss")  # latents, states, windows
STOPS = [*range(3, 12)]


@dataclass(frozen=True)
class Judged:
    folder: Path
    model: PreTrainedModel


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    folder = tmp_path_factory.mktemp("beams")
    return Judged(folder, judges.save("llama", folder))


def engine_of(folder: Path, **settings: object) -> Engine:
    given = {"dtype": "float32", "max_model_len": 1024, "num_gpu_blocks_override": 400}
    return build_engine(EngineConfig(model=folder, **{**given, "max_num_seqs": 16, **settings}))


def asked(prompts: list[list[int]], params: SamplingParams) -> list[AddSequence]:
    return [
        AddSequence(f"{place} {rank}", prompt, params, choice=rank, group=f"{place} 0")
        for place, prompt in enumerate(prompts)
        for rank in range(params.n)
    ]


def answers(engine: Engine, additions: list[AddSequence]) -> dict[str, Output]:
    for addition in additions:
        engine.add(addition)
    found: dict[str, Output] = {}
    while engine.busy:
        for output in engine.step():
            assert output.error is None, output.error
            assert found.setdefault(output.seq_id, output) is output
    pool = engine.scheduler.pool
    assert pool.num_held == pool.num_shared == engine.stats().num_waiting == 0
    return found


@torch.inference_mode()
def expected(
    model: PreTrainedModel, prompt: list[int], params: SamplingParams, stop_ids: list[int]
) -> tuple[list[list[int]], list[float]]:
    """The completions of transformers up to their ends, and their scores."""
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=params.num_drawn,
        num_return_sequences=params.n,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=stop_ids or None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        suppress_tokens=(
            None
            if params.allowed_token_ids is None
            else [each for each in range(judges.VOCAB) if each not in params.allowed_token_ids]
        ),
    )
    ids = [each[len(prompt) :] for each in made.sequences.tolist()]
    ends = [
        next((at + 1 for at, each in enumerate(some) if each in stop_ids), len(some))
        for some in ids
    ]
    return [some[:end] for some, end in zip(ids, ends, strict=True)], made.sequences_scores.tolist()


def assert_equal(
    found: dict[str, Output],
    judge: PreTrainedModel,
    prompts: list[list[int]],
    params: SamplingParams,
) -> None:
    stop_ids = params.stop_token_ids + ([] if params.ignore_eos else [judges.EOS])
    for place, prompt in enumerate(prompts):
        ids, scores = expected(judge, prompt, params, stop_ids)
        outputs = [found[f"{place} {rank}"] for rank in range(params.n)]
        assert [output.token_ids for output in outputs] == ids
        for output, score in zip(outputs, scores, strict=True):
            total = sum(each.logprob for each in output.logprobs or [])
            length = len(output.token_ids)
            assert total / length**params.length_penalty == pytest.approx(score, rel=1e-5, abs=2e-4)
            ends = output.token_ids[-1] in stop_ids
            assert output.finish_reason == ("stop" if ends else "length")
            assert output.stop_reason == (
                output.token_ids[-1] if output.token_ids[-1] in params.stop_token_ids else None
            )


WAYS = {
    "four": {"n": 4},
    "two of five": {"n": 2, "best_of": 5},
    "short": {"n": 3, "length_penalty": -1.5, "stop_token_ids": STOPS},
    "long": {"n": 3, "length_penalty": 2.5, "stop_token_ids": STOPS},
    "no penalty": {"n": 3, "length_penalty": 0.0, "stop_token_ids": STOPS},
    "early": {"n": 4, "early_stopping": True, "stop_token_ids": STOPS},
    "never": {"n": 3, "early_stopping": "never", "stop_token_ids": STOPS},
    "never, short": {
        "n": 4,
        "early_stopping": "never",
        "length_penalty": -0.5,
        "stop_token_ids": STOPS,
    },
    "no end": {"n": 4, "ignore_eos": True},
    "one token": {"n": 4, "max_tokens": 1},
    "few allowed": {"n": 2, "best_of": 4, "allowed_token_ids": [20, 30, 40, 50, 60]},
}


@pytest.mark.parametrize("way", WAYS)
def test_answers_and_scores_are_those_of_transformers(llama: Judged, way: str) -> None:
    params = SamplingParams(
        **{"use_beam_search": True, "max_tokens": 24, "logprobs": 0, **WAYS[way]}
    )
    prompts = [judges.prompt(length, length) for length in (1, 16, 17, 50)]
    found = answers(engine_of(llama.folder), asked(prompts, params))
    assert_equal(found, llama.model, prompts, params)


SHORTAGES = {
    "no prefix cache": {"enable_prefix_caching": False, "max_num_seqs": 24},
    "fewer rows than beams": {"max_num_seqs": 3},
    "one row": {"max_num_seqs": 1},
    "few_blocks": {"num_gpu_blocks_override": 9, "max_model_len": 144},
    "few blocks, no prefix cache": {
        "num_gpu_blocks_override": 9,
        "max_model_len": 144,
        "enable_prefix_caching": False,
    },
    "short steps": {"max_num_batched_tokens": 6, "max_num_seqs": 6},
}


@pytest.mark.parametrize("shortage", SHORTAGES)
@pytest.mark.slow
def test_shortages_change_no_answer(llama: Judged, shortage: str) -> None:
    params = SamplingParams(n=4, use_beam_search=True, max_tokens=28, logprobs=0, best_of=5)
    prompts = [judges.prompt(length, length) for length in (1, 16, 37, 50)]
    engine = engine_of(llama.folder, **SHORTAGES[shortage])
    assert_equal(answers(engine, asked(prompts, params)), llama.model, prompts, params)
    assert bool(engine.stats().recomputed_tokens) == (shortage != "no prefix cache")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_latents_states_and_windows_follow_their_beams(family: str, tmp_path: Path) -> None:
    """Each answer's tokens are scored again, since transformers has no search of some of these."""
    families.save(family, tmp_path)
    overrides = {"max_position_embeddings": 1024}
    params = SamplingParams(n=4, use_beam_search=True, max_tokens=30, logprobs=0, ignore_eos=True)
    prompts = [judges.prompt(length, length) for length in (1, 37)]
    made = []
    for settings in ({}, {"enable_prefix_caching": False}, {"max_num_seqs": 1}):
        engine = engine_of(tmp_path, hf_overrides=overrides, **settings)
        found = answers(engine, asked(prompts, params))
        made.append({name: output.token_ids for name, output in found.items()})
    assert made[0] == made[1] == made[2]
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    engine = engine_of(
        tmp_path,
        hf_overrides=overrides,
        enable_prefix_caching=False,
        max_num_batched_tokens=512,
    )
    for name, output in found.items():
        prompt = prompts[int(name[0])]
        engine.add(AddSequence(name, prompt + output.token_ids, scored))
        (told,) = engine.step()
        again = [each.logprob for each in (told.prompt_logprobs or [])[len(prompt) - 1 :]]
        assert again == pytest.approx([each.logprob for each in output.logprobs or []], abs=1e-3)


def test_beams_share_what_they_have_in_common(llama: Judged) -> None:
    engine = engine_of(llama.folder, enable_prefix_caching=False)
    params = SamplingParams(n=4, use_beam_search=True, max_tokens=40, ignore_eos=True)
    prompt = judges.prompt(50)
    found = answers(engine, asked([prompt], params))
    assert all(len(output.token_ids) == 40 for output in found.values())
    # One computes the prompt; each beam each of its tokens but the last, and none another's again.
    assert engine.stats().computed_tokens == 50 + 4 * 39
    assert engine.stats().recomputed_tokens == 0


def test_beams_run_beside_others_which_notice_nothing(llama: Judged) -> None:
    params = SamplingParams(n=4, use_beam_search=True, max_tokens=30, logprobs=0)
    beside = SamplingParams(max_tokens=30, temperature=1.0, logprobs=3, ignore_eos=True)
    prompts = [judges.prompt(37)]
    others = [AddSequence(f"other {n}", judges.prompt(20 + n), beside, seed=n) for n in range(3)]

    def said(engine: Engine, additions: list[AddSequence]) -> dict[str, list[int]]:
        for addition in additions:
            engine.add(addition)
        ids: dict[str, list[int]] = {}
        while engine.busy:
            for output in engine.step():
                ids.setdefault(output.seq_id, []).extend(output.token_ids)
        return ids

    alone = said(engine_of(llama.folder), others)
    alone |= said(engine_of(llama.folder), asked(prompts, params))
    both = [*others[:1], *asked(prompts, params), *others[1:]]
    assert said(engine_of(llama.folder), both) == alone


def test_nobody_waits_for_an_answer_that_is_cancelled(llama: Judged) -> None:
    engine = engine_of(llama.folder)
    params = SamplingParams(n=3, use_beam_search=True, max_tokens=200, ignore_eos=True)
    additions = asked([judges.prompt(37)], params)
    for addition in additions:
        engine.add(addition)
    for _ in range(10):
        assert engine.step() == []
    engine.cancel("0 0")
    engine.cancel("0 2")
    engine.step()
    assert engine.scheduler.running
    engine.cancel("0 1")
    engine.step()
    assert not engine.busy and not engine.stats().num_waiting
    assert engine.scheduler.pool.num_held == 0
    engine.cancel("0 1")  # no error
    engine.step()


def test_the_last_answer_may_be_asked_for_late(llama: Judged) -> None:
    params = SamplingParams(n=3, use_beam_search=True, max_tokens=12, logprobs=0)
    additions = asked([judges.prompt(37)], params)
    whole = answers(engine_of(llama.folder), additions)
    engine = engine_of(llama.folder)
    assert answers(engine, additions[:2]) | answers(engine, additions[2:]) == {
        name: output if name != "0 2" else _found(output) for name, output in whole.items()
    }


def _found(output: Output) -> Output:
    """The same answer, of a prompt that is found in the cache."""
    fields = output.seq_id, output.token_ids, output.logprobs, output.finish_reason
    return Output(*fields, output.stop_reason, 32)


def test_more_answers_than_are_possible_are_refused(llama: Judged) -> None:
    engine = engine_of(llama.folder)
    params = SamplingParams(
        n=3, use_beam_search=True, max_tokens=1, allowed_token_ids=[20, 30], ignore_eos=True
    )
    for addition in asked([judges.prompt(5)], params):
        engine.add(addition)
    outputs = engine.step()
    assert sorted(output.token_ids for output in outputs[:2]) == [[20], [30]]
    assert outputs[2].error is not None and outputs[2].error.param == "n"
    assert "2 answers can be made" in outputs[2].error.message


def test_logits_that_are_no_numbers_end_the_search_and_nothing_else(llama: Judged) -> None:
    engine = engine_of(llama.folder)
    params = SamplingParams(n=3, use_beam_search=True, max_tokens=30, ignore_eos=True)
    for addition in asked([judges.prompt(37)], params):
        engine.add(addition)
    engine.add(AddSequence("other", judges.prompt(20), SamplingParams(max_tokens=30)))
    for _ in range(3):
        engine.step()
    block = next(seq for seq in engine.scheduler.running if seq.is_beam).block_table[-1]
    engine.runner.kv_caches[0][block] = torch.nan
    outputs = engine.step()
    refused = {output.seq_id for output in outputs if output.error is not None}
    assert refused == {"0 0", "0 1", "0 2"}
    while engine.busy:
        assert all(output.error is None for output in engine.step())
    assert engine.scheduler.pool.num_held == 0
    assert not any(cache.isnan().any() for cache in engine.runner.kv_caches)


def test_beams_are_chosen_before_their_next_step_is_launched(llama: Judged) -> None:
    params = SamplingParams(n=4, use_beam_search=True, max_tokens=24, logprobs=0)
    prompts = [judges.prompt(37)]
    engine = engine_of(llama.folder)
    engine.ahead = engine.runner
    assert_equal(answers(engine, asked(prompts, params)), llama.model, prompts, params)

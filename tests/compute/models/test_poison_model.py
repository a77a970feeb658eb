"""What could hurt a real engine ends its own job, and every other ends as if it had been alone."""

from pathlib import Path

import pytest
import torch
from numpy import inf, nan

import judges
import tokenizers_made
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from penstock.worker.engine.build import build_engine
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.engine.io.messages import AddSequence, Output
from penstock.worker.engine.sampling.sampler import Sampler
from penstock.worker.engine.sampling.sampler_row import SamplerRow

SPOILT = 300  # a token whose embedding is no number
EVERY_ID = range(judges.VOCAB)
PROMPT = [*judges.prompt(40, 99), SPOILT, *judges.prompt(150, 98)]


@pytest.fixture(scope="module", params=["llama", "mistral_window"])
def nans(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The window is of 20 tokens: what lies further back is no longer seen."""
    return save(tmp_path_factory.mktemp("judge"), str(request.param), nan)


@pytest.fixture(scope="module")
def infinite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("infinite"), "llama", inf)


@torch.inference_mode()
def save(folder: Path, name: str, number: float) -> Path:
    model = judges.build(name).bfloat16()
    model.get_input_embeddings().weight[SPOILT] = number
    model.save_pretrained(folder)
    return tokenizers_made.save(tokenizers_made.byte_level(), folder)


def engine_of(folder: Path, **changes: object) -> Engine:
    settings: dict[str, object] = {
        "deterministic": True,
        "num_gpu_blocks_override": 24,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
    }
    return build_engine(EngineConfig(model=folder, **(settings | changes)))


def healthy() -> list[AddSequence]:
    params = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True)
    return [
        AddSequence(f"healthy {n}", judges.prompt(5 + 7 * n, n), params, seed=n) for n in range(8)
    ]


def told(engine: Engine, additions: list[AddSequence]) -> dict[str, list[Output]]:
    for addition in additions:
        engine.add(addition)
    found: dict[str, list[Output]] = {addition.seq_id: [] for addition in additions}
    while not all(outputs and is_end(outputs[-1]) for outputs in found.values()):
        engine.wait(0.1)  # for a grammar to be compiled
        for output in engine.step():
            found[output.seq_id].append(output)
    return found


def is_end(output: Output) -> bool:
    return output.finish_reason is not None or output.error is not None


def tokens(found: dict[str, list[Output]]) -> dict[str, list[int]]:
    return {
        name: [token for output in outputs for token in output.token_ids]
        for name, outputs in found.items()
        if name.startswith("healthy")
    }


@pytest.mark.parametrize("group", ["", "poison"])
@pytest.mark.parametrize("num_behind, step_tokens", [(150, 64), (700, 1024)])
def test_a_prompt_whose_numbers_are_none_fails_and_leaves_none_behind(
    nans: Path, num_behind: int, step_tokens: int, group: str
) -> None:
    """Also where windows hide them from the last token, from which the next one is drawn."""
    settings = {"max_num_batched_tokens": step_tokens, "num_gpu_blocks_override": 64}
    alone = tokens(told(engine_of(nans, **settings), healthy()))
    engine = engine_of(nans, **settings)
    prompt = [*judges.prompt(40, 99), SPOILT, *judges.prompt(num_behind, 98)]
    params = SamplingParams(max_tokens=5)
    poison = [AddSequence(f"poison {n}", prompt, params, group=group) for n in range(3)]
    found = told(engine, poison)
    assert [each[-1].error.code for each in found.values() if each[-1].error] == [
        "worker_failed"
    ] * 3
    assert tokens(told(engine, healthy())) == alone


def test_it_leaves_none_behind_when_it_is_cancelled_before_its_first_token(nans: Path) -> None:
    """Its blocks are whoever's come next, who fills them from the front only."""
    alone = tokens(told(engine_of(nans), healthy()))
    engine = engine_of(nans)
    for number in range(4):
        engine.add(AddSequence(f"poison {number}", PROMPT, SamplingParams(max_tokens=5)))
        engine.step()
        engine.cancel(f"poison {number}")
        engine.step()
    assert tokens(told(engine, healthy())) == alone


def test_nor_when_it_gives_way_to_a_higher_class(nans: Path) -> None:
    alone = tokens(told(engine_of(nans), healthy()))
    engine = engine_of(nans, priority_preemption_threshold=1)
    engine.add(AddSequence("poison", PROMPT, SamplingParams(max_tokens=5), priority=2))
    engine.step()
    assert tokens(told(engine, healthy())) == alone


@pytest.mark.parametrize("settings", [{}, {"dtype": "float32"}, {"quantization": "int8"}], ids=str)
def test_infinite_numbers_are_none(infinite: Path, settings: dict[str, object]) -> None:
    alone = tokens(told(engine_of(infinite, **settings), healthy()))
    engine = engine_of(infinite, **settings)
    engine.add(AddSequence("poison", PROMPT, SamplingParams(max_tokens=5)))
    engine.step()
    engine.cancel("poison")
    assert tokens(told(engine, healthy())) == alone


FORMS = {
    "a grammar that is over": StructuredOutputs(choice=["a"]),
    "no text": StructuredOutputs(regex="[^\\s\\S]"),
    "no end": StructuredOutputs(grammar='start: "a" start'),
    "no schema": StructuredOutputs(json_schema={"enum": []}),
}
ODD = {
    "a tiny repetition penalty": SamplingParams(repetition_penalty=5e-324, max_tokens=6),
    "one that overflows, under min_tokens": SamplingParams(
        repetition_penalty=1e-39, max_tokens=6, min_tokens=6, stop_token_ids=[7, 8]
    ),
    "all tokens against": SamplingParams(
        logit_bias=dict.fromkeys(EVERY_ID, -100.0), max_tokens=6, logprobs=20
    ),
    "the last token": SamplingParams(logit_bias={EVERY_ID[-1]: 100}, max_tokens=6, logprobs=20),
    "no temperature": SamplingParams(temperature=5e-324, max_tokens=6),
    "every cut": SamplingParams(top_k=10**30, top_p=5e-324, min_p=1, temperature=2, max_tokens=6),
    "nothing allowed to it": SamplingParams(
        allowed_token_ids=[7, 8], stop_token_ids=[7, 8], min_tokens=6, max_tokens=6
    ),
    "every exclusion": SamplingParams(
        top_n_sigma=1e-9,
        top_k=10**400,
        top_p=5e-324,
        min_p=1,
        top_a=1,
        typical_p=5e-324,
        xtc_probability=1,
        xtc_threshold=0,
        temperature=2,
        max_tokens=6,
    ),
    "no repetition": SamplingParams(
        dry_multiplier=100, dry_base=100, dry_sequence_breakers=[], max_tokens=6
    ),
    "bad words": SamplingParams(bad_words=["a", "the end"], max_tokens=6),
    "one thing allowed to it": SamplingParams(allowed_token_ids=[7], max_tokens=6, logprobs=20),
    "every stop": SamplingParams(stop_token_ids=[*range(64)], min_tokens=6, max_tokens=6),
    "a full context": SamplingParams(max_tokens=None),
    **{
        name: SamplingParams(structured_outputs=form, min_tokens=30, max_tokens=30)
        for name, form in FORMS.items()
    },
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_odd_jobs_end_and_disturb_nobody(infinite: Path, dtype: str) -> None:
    settings = {"dtype": dtype, "num_gpu_blocks_override": 100}
    alone = tokens(told(engine_of(infinite, **settings), healthy()))
    prompts = {"a full context": judges.prompt(1023, 1)}
    odd = [AddSequence(name, prompts.get(name, [5, 319]), params) for name, params in ODD.items()]
    found = told(engine_of(infinite, **settings), [*healthy()[:4], *odd, *healthy()[4:]])
    assert tokens(found) == alone
    for name in ODD:
        error = found[name][-1].error
        assert (error.code if error else None) == WRONG.get(name), name


WRONG = {
    "no text": "invalid_value",
    "no end": "invalid_value",
    "no schema": "unsupported_schema",
    "nothing allowed to it": "invalid_value",
}


def test_sixteen_choices_with_room_for_one_take_turns(infinite: Path) -> None:
    params = SamplingParams(n=16, max_tokens=20, ignore_eos=True)
    asked = [AddSequence(f"healthy {n}", judges.prompt(30), params, 7, n) for n in range(16)]
    roomy = told(engine_of(infinite, num_gpu_blocks_override=100), asked)
    assert tokens(told(engine_of(infinite, num_gpu_blocks_override=4), asked)) == tokens(roomy)


def test_no_more_alternatives_are_told_than_the_vocabulary_has() -> None:
    params = SamplingParams(logprobs=20, temperature=0)
    row = SamplerRow(params, seed=0, choice=0, token_ids=[1], num_prompt=1)
    found = Sampler(6, frozenset()).sample(torch.tensor([[1.0, 5, 2, 4, 3, 0]]), [row])
    [logprob] = found.logprobs
    assert logprob is not None and logprob.top_ids == [1, 3, 4, 2, 0, 5]
    assert len(logprob.top_logprobs) == 6

"""Constrained generation through the whole engine, by a model that has no idea of JSON."""

import json
import shutil
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator, FormatChecker

import judges
import tokenizers_made
from paths import SUPPORT
from penstock.schemas.errors import PenstockError
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from penstock.worker.engine.build import build_engine
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.engine.io.messages import AddSequence
from penstock.worker.llm import LLM

FORMS = json.loads((SUPPORT / "forms.json").read_text())
TIMES = 25


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    """In the bits that CPU operations are compiled for, as most are served."""
    limits = {"max_num_seqs": 64, "kv_cache_memory_bytes": 60_000_000}
    return LLM(str(folder), dtype="bfloat16", **limits)


@pytest.mark.slow
def test_every_finished_one_of_500_generations_validates(llm: LLM) -> None:
    asked = [(name, number) for name in FORMS for number in range(TIMES)]
    assert len(asked) >= 500 and len(FORMS) >= 20
    outputs = llm.generate(
        [f"{name} {number}" for name, number in asked],
        [
            SamplingParams(
                seed=number,
                max_tokens=120,
                structured_outputs=StructuredOutputs(json_schema=FORMS[name]),
            )
            for name, number in asked
        ],
        use_tqdm=False,
    )
    finished = 0
    for (name, _), output in zip(asked, outputs, strict=True):
        [made] = output.outputs
        if made.finish_reason == "stop":
            finished += 1
            check = Draft202012Validator(FORMS[name], format_checker=FormatChecker())
            check.validate(json.loads(made.text))
    assert finished > len(asked) / 3  # the others were cut off by max_tokens, and say so


def test_cancelling_while_the_grammar_compiles_disturbs_nobody(folder: Path) -> None:
    engine = build_engine(EngineConfig(model=folder, kv_cache_memory_bytes=60_000_000))
    schema = StructuredOutputs(json_schema=FORMS["flat"])
    held = SamplingParams(max_tokens=5, structured_outputs=schema)
    engine.add(AddSequence("cancelled", [5, 6], held))
    engine.add(AddSequence("free", [5, 6], SamplingParams(max_tokens=5, ignore_eos=True)))
    engine.cancel("cancelled")
    drawn = [output.seq_id for _ in range(5) for output in engine.step()]
    assert drawn == ["free"] * 5
    while engine.wait(2):  # the grammar arrives, and finds nobody
        assert engine.step() == []
    engine.add(AddSequence("held", [5, 6], held))
    while not (outputs := engine.step()):
        engine.wait(2)
    assert [output.seq_id for output in outputs] == ["held"]


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_keeps_to_forms(
    folder: Path, tmp_path: Path
) -> None:
    made = tokenizers_made.byte_level()
    made.add_tokens([f"{letter}ellow" for letter in "abcdefghijklmnopqrstuvwxyz"])
    shutil.copytree(folder, tmp_path / "more")
    llm = LLM(str(tokenizers_made.save(made, tmp_path / "more")), kv_cache_memory_bytes=20_000_000)
    assert made.get_vocab_size() == judges.VOCAB + 26
    forms = StructuredOutputs(choice=["yellow", "fellow"])
    params = SamplingParams(n=8, max_tokens=20, seed=1, structured_outputs=forms)
    [output] = llm.generate("a", params, use_tqdm=False)
    assert {each.text for each in output.outputs} <= {"yellow", "fellow"}


def test_a_tokenizer_whose_bytes_are_not_known_says_that_forms_are_not_served(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "words")
    words = tokenizers_made.save(tokenizers_made.wordpiece(), tmp_path / "words")
    llm = LLM(str(words), kv_cache_memory_bytes=20_000_000)
    params = SamplingParams(structured_outputs=StructuredOutputs(choice=["a"]))
    for _ in range(2):
        with pytest.raises(PenstockError, match="not served by this model") as refused:
            llm.generate("a", params, use_tqdm=False)
        assert (refused.value.status, refused.value.body().retryable) == (501, False)

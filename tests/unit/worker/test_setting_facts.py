"""A setting of an engine is one field: what its facts say needs no other place."""

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field, ValidationError

from penstock.compose.plan import PlanSettings
from penstock.schemas.errors import InvalidJob
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.engine.io.setting_facts import ChangesTokens, Obeyed, facts, usual
from penstock.worker.engine_loader import load_engine
from penstock.worker.external import vllm_engine
from penstock.worker.process import fingerprint
from penstock.worker.process.settings import WorkerSettings


class Wider(WorkerSettings):
    """Settings with one more, as a feature adds it."""

    num_drafts: Annotated[int, Obeyed(fake=False, vllm=True, neutral=(1,)), ChangesTokens(99)] = (
        Field(0, ge=0)
    )


def of_fake(**settings: object) -> Wider:
    return Wider.model_validate({"model": "fake", "load_format": "fake"} | settings)


def test_an_engine_that_does_not_obey_a_new_setting_refuses_it() -> None:
    servers = {"model": "x", "engine": "openai", "engine_url": "http://here"}
    with pytest.raises(ValidationError, match="--engine openai does not obey it"):
        Wider.model_validate(servers | {"num_drafts": 2})
    with pytest.raises(InvalidJob, match="num_drafts: the fake model does not obey it"):
        load_engine(of_fake(num_drafts=2))
    assert Wider.model_validate({"model": "x", "engine": "vllm", "num_drafts": 2}).num_drafts == 2
    assert load_engine(of_fake(num_drafts=1)) and load_engine(of_fake())


def test_a_new_setting_that_changes_tokens_is_in_the_fingerprint_where_it_is_not_as_usual() -> None:
    before = fingerprint.fingerprint(
        WorkerSettings.model_validate({"model": "fake", "load_format": "fake"})
    )
    assert fingerprint.fingerprint(of_fake()) == before
    assert fingerprint.fingerprint(of_fake(num_drafts=2)) != before


def test_each_setting_of_an_engine_says_what_obeys_it() -> None:
    assert facts(EngineConfig, Obeyed).keys() == EngineConfig.model_fields.keys() - {
        "model",
        "tokenizer",
    }


def test_a_place_in_the_fingerprint_is_of_one_setting() -> None:
    places = [fact.place for fact in facts(WorkerSettings, ChangesTokens).values()]
    assert sorted([*places, fingerprint.GENERATION]) == [*range(len(places) + 1)]


def test_the_fingerprint_is_that_of_earlier_versions(tmp_path: Path) -> None:
    """Workers of two versions go on with each other's jobs."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    settings = {
        "dtype": "float32",
        "quantization": "int8",
        "deterministic": True,
        "block_size": 32,
        "kv_cache_dtype": "fp8_e4m3",
        "attention_backend": "torch",
        "model_impl": "native",
        "runner": "generate",
        "pooler_config": {"pooling_type": "CLS"},
        "hf_overrides": {"b": 1, "a": 2},
        "chat_template": "{{ messages }}",
        "chat_template_content_format": "openai",
    }
    both = WorkerSettings.model_validate({"model": str(tmp_path)} | settings)
    assert fingerprint.fingerprint(both) == "8996e528bb3dda1a"
    vllm = {"model": str(tmp_path), "engine": "vllm", "engine_args": {"seed": 1}}
    assert fingerprint.fingerprint(WorkerSettings.model_validate(vllm)) == "c2b611be8827a926"


def test_arguments_of_vllm_are_what_it_obeys() -> None:
    assert {"block_size", "max_num_seqs", "load_format"} < vllm_engine.PASSED_ON
    assert not {"max_step_ms", "override_generation_config"} & vllm_engine.PASSED_ON


def test_a_plan_has_the_defaults_of_a_worker() -> None:
    for name in PlanSettings.model_fields.keys() & WorkerSettings.model_fields.keys() - {"device"}:
        assert usual(PlanSettings, name) == usual(WorkerSettings, name), name

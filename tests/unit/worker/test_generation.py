"""A model's own defaults of sampling count for jobs that do not say otherwise, no others."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue
from transformers import AutoTokenizer, GenerationConfig

import judges
import tokenizers_made
from penstock.gateway.auth.access import Caller
from penstock.gateway.openai.forms import any_job
from penstock.schemas.delivery import Started
from penstock.schemas.errors import InvalidJob
from penstock.schemas.job import Chat, Job
from penstock.schemas.params.sampling import MODEL_DEFAULTS, SamplingParams
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.jobs.consumer import Intake
from penstock.worker.llm import LLM
from penstock.worker.process.fingerprint import fingerprint
from penstock.worker.process.sampling_defaults import load_generation
from penstock.worker.process.settings import WorkerSettings
from penstock.worker.text.model_tokenizer import load_tokenizer

OWN: dict[str, JsonValue] = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
}
USUAL = SamplingParams()
LIMITS = EngineLimits(1000, 320, 100, 16, 8, frozenset({2}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    judges.save("llama", folder)
    GenerationConfig(do_sample=True, eos_token_id=2, **OWN).save_pretrained(folder)
    return tokenizers_made.save(tokenizers_made.byte_level(), folder)


def settings(folder: Path, **fields: object) -> WorkerSettings:
    return WorkerSettings.model_validate({"model": str(folder)} | fields)


def drawn_by(worker: WorkerSettings, job: Job) -> SamplingParams:
    """What the engine is told of a job, after Redis."""
    intake = Intake(worker, load_tokenizer(worker), LIMITS, load_generation(worker))
    stored = Job.model_validate_json(job.dump())
    active = asyncio.run(intake.prepare(Started(stored, 1, [], left_ms=None, waited_ms=0)))
    [addition] = intake.additions(active)
    return addition.params


def asked(**body: JsonValue) -> Job:
    job, _ = any_job("job_0_x", Caller(), {"model": "m", "prompt": "x"} | body)
    return job


some = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1.0, 0.3]),
        "top_p": st.sampled_from([1.0, 0.5]),
        "top_k": st.sampled_from([0, -1, 7]),
        "min_p": st.sampled_from([0.0, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 2.0]),
        "max_tokens": st.sampled_from([16, 5]),
        "logprobs": st.sampled_from([None, 2]),
    },
)


@given(fields=some)
def test_what_a_job_gives_it_gives_after_redis_too(fields):
    """The usual value as well: 1.0 is another wish than none."""
    params = SamplingParams(**fields)
    job = Job(job_id="j", model="m", prompts=["x"], params=params)
    stored = Job.model_validate_json(job.dump())
    assert stored.params == params and stored.params.given() == fields.keys() & MODEL_DEFAULTS
    assert stored.dump() == job.dump()
    others = {name: value for name, value in fields.items() if name not in MODEL_DEFAULTS}
    alike = (
        job.dump_and_digest()[1]
        == Job(
            job_id="j", model="m", prompts=["x"], params=SamplingParams(**others)
        ).dump_and_digest()[1]
    )
    assert alike == (not params.given())


def test_a_repeated_job_is_known_in_another_process():
    """Whatever the order there of what a set holds."""
    program = (
        "from penstock.schemas.job import Job\n"
        "from penstock.schemas.params.sampling import SamplingParams as P\n"
        "usual = {name: getattr(P(), name) for name in ('min_p', 'top_p', 'repetition_penalty')}\n"
        "job = Job(job_id='j', model='m', prompts=['x'], params=P(**usual))\n"
        "print(job.dump_and_digest())"
    )
    told = {
        subprocess.check_output(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": str(seed)}
        )
        for seed in range(4)
    }
    assert len(told) == 1


def test_a_jobs_defaults_are_the_models_and_what_it_gives_is_its_own(folder):
    worker = settings(folder)
    assert drawn_by(worker, asked()).model_dump(include=set(OWN)) == OWN
    for name in OWN:
        usual = getattr(USUAL, name)
        told = drawn_by(worker, asked(**{name: usual})).model_dump(include=set(OWN))
        assert told == OWN | {name: usual}


@pytest.mark.parametrize("source", ["vllm", "auto", "folder"])
def test_defaults_come_from_where_the_settings_say(folder, tmp_path, source):
    (tmp_path / "generation_config.json").write_text('{"top_k": 3, "temperature": null}')
    named = {"folder": str(tmp_path)}.get(source, source)
    expected = {"vllm": {}, "auto": OWN, "folder": {"top_k": 3}}[source]
    assert load_generation(settings(folder, generation_config=named)).defaults == expected
    worker = settings(folder, generation_config=named, override_generation_config={"top_k": 9})
    assert drawn_by(worker, asked()).top_k == 9
    assert fingerprint(worker) != fingerprint(settings(folder, generation_config=named))


def test_without_defaults_the_fingerprint_is_that_of_the_files(folder, tmp_path):
    bare = Path(shutil.copytree(folder, tmp_path / "bare"))
    (bare / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert fingerprint(settings(bare)) == fingerprint(settings(bare, generation_config="vllm"))
    assert fingerprint(settings(folder)) != fingerprint(settings(folder, generation_config="vllm"))


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"override_generation_config": {"temperature": 9}}, "temperature: .*--generation-config"),
        ({"override_generation_config": {"max_tokens": 9}}, "max_tokens cannot be given; known"),
        ({"override_generation_config": {"top_k": "x"}}, "top_k: "),
        ({"generation_config": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_defaults_that_cannot_be_applied_are_refused_by_name(folder, fields, says):
    with pytest.raises(InvalidJob, match=says):
        load_generation(settings(folder, **fields))


def test_llm_without_parameters_draws_as_the_model_has_it_and_else_as_given(folder):
    told = {"override_generation_config": {"temperature": 0.0}, "kv_cache_memory_bytes": 20_000_000}
    llm = LLM(str(folder), **told)
    own = llm.get_default_sampling_params()
    assert own.model_dump(include=set(OWN)) == OWN | {"temperature": 0.0}
    [first], [second] = llm.generate("x", use_tqdm=False), llm.generate("x", own, use_tqdm=False)
    assert first.outputs == second.outputs
    drawn = {llm.generate("x", SamplingParams(), use_tqdm=False)[0].outputs[0].text for _ in "abc"}
    assert len(drawn) > 1


@pytest.mark.parametrize("files", [["json"], ["json", "config"], ["json", "config", "jinja"]])
def test_a_template_in_a_file_of_its_own_counts_where_no_other_is(folder, tmp_path, files):
    """The others as transformers has it: of two the newer form."""
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    (model / "chat_template.jinja").unlink()
    if "config" in files:
        config["chat_template"] = "from config"
        (model / "tokenizer_config.json").write_text(json.dumps(config))
    if "jinja" in files:
        (model / "chat_template.jinja").write_text("from jinja")
    text = load_tokenizer(settings(model))
    chat = Chat(messages=[{"role": "user", "content": "Hi"}])
    assert text.decode(text.render(chat)) == f"from {files[-1]}"
    theirs = AutoTokenizer.from_pretrained(model).chat_template
    assert theirs == (None if files == ["json"] else f"from {files[-1]}")


def test_a_template_file_without_a_template_is_refused(folder, tmp_path):
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    for written in ("{", "{}", '{"chat_template": 3}'):
        (model / "chat_template.json").write_text(written)
        with pytest.raises(InvalidJob, match=r"chat_template\.json: "):
            load_tokenizer(settings(model))

"""vLLM as a worker's engine, beside our own with the same model: numbers, parameters, refusals."""

import json
import os
import subprocess
from collections.abc import Iterator

import jsonschema
import pytest

from engine_stages import THEIRS, EngineStage, answers
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.event import Result
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.llm import LLM
from worker_process import ask

NAMES = [name for name in THEIRS if "vllm" in name.lower()]
LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 60}
PROMPTS = ["Once upon a time there were 3 ", "The capital of", "One plus two is"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=NAMES)
def stage(request: pytest.FixtureRequest) -> Iterator[EngineStage]:
    with THEIRS[request.param]() as stage:
        stage.workers()
        yield stage


@pytest.fixture(scope="module")
def ours() -> LLM:
    return LLM(str(BUNDLED_MODEL), dtype="float32")


def results(stage: EngineStage, params: SamplingParams) -> list[Result]:
    found = []

    async def asks(client: QueueClient) -> None:
        for prompt in PROMPTS:
            result = await client.result(await client.enqueue(prompt, params=params))
            assert result is not None
            found.append(result)

    ask(stage.url, asks)
    return found


GREEDY = {"temperature": 0, "max_tokens": 40}
SAME = {
    "greedy": GREEDY,
    "penalties": GREEDY | {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    "a repetition penalty": GREEDY | {"repetition_penalty": 1.3},
    "a bias": GREEDY | {"logit_bias": {400: 8.0, 500: -100.0}},
    "allowed tokens": GREEDY | {"allowed_token_ids": [400, 500, 15, 228]},
    "no end": GREEDY | {"ignore_eos": True, "max_tokens": 120},
    "a least length": GREEDY | {"min_tokens": 39},
    "a stop id": GREEDY | {"stop_token_ids": [15, 228, 19]},
    "a stop string": GREEDY | {"stop": [" a ", "ma"]},
    "one token of many": GREEDY | {"temperature": 1.0, "top_k": 1},
    "a choice": GREEDY | {"structured_outputs": StructuredOutputs(choice=["never", "always"])},
}


@pytest.mark.parametrize("given", SAME.values(), ids=SAME)
def test_answers_are_ours(stage: EngineStage, ours: LLM, given: dict[str, object]) -> None:
    params = SamplingParams.model_validate(given)
    for result, expected in zip(
        results(stage, params), ours.generate(PROMPTS, params), strict=True
    ):
        assert result.error is None
        [choice], [own] = result.choices, expected.outputs
        assert choice.text == own.text
        assert (choice.finish_reason, choice.stop_reason) == (own.finish_reason, own.stop_reason)
        if params.structured_outputs is None:  # else the same text may be of other tokens
            assert choice.token_ids == own.token_ids


def test_log_probabilities_are_ours(stage: EngineStage, ours: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=3)
    for result, expected in zip(
        results(stage, params), ours.generate(PROMPTS, params), strict=True
    ):
        theirs, own = result.choices[0].logprobs, expected.outputs[0].logprobs
        assert theirs and own and len(theirs) == len(own)
        for one, other in zip(theirs, own, strict=True):
            assert (one.token_id, one.token) == (other.token_id, other.token)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert len(one.top) == 3 and one.top[0].token_id == other.top[0].token_id


def test_structure_holds_and_a_seed_repeats(stage: EngineStage) -> None:
    params = SamplingParams(
        seed=5, max_tokens=120, n=2, structured_outputs=StructuredOutputs(json_schema=SCHEMA)
    )
    first, second = results(stage, params), results(stage, params)
    for result, again in zip(first, second, strict=True):
        assert [each.text for each in result.choices] == [each.text for each in again.choices]
        for choice in result.choices:
            if choice.finish_reason == "stop":
                jsonschema.validate(json.loads(choice.text), SCHEMA)
    assert any(len({each.text for each in result.choices}) == 2 for result in first)


STATES = {
    "a seed": {"seed": 3},
    "a presence penalty": GREEDY | {"presence_penalty": 0.5},
    "a schema": GREEDY | {"structured_outputs": StructuredOutputs(json_schema=LIST)},
}


@pytest.mark.parametrize("given", STATES.values(), ids=STATES)
def test_an_answer_with_a_state_goes_on_after_a_kill(
    stage: EngineStage, given: dict[str, object]
) -> None:
    params = SamplingParams.model_validate(given | {"max_tokens": 300, "ignore_eos": True})
    if params.structured_outputs is not None:
        params = params.model_copy(update={"ignore_eos": False})
    expected = answers(stage, lambda: None, PROMPTS, params)
    first, _ = stage.workers(2)
    assert answers(stage, first.kill, PROMPTS, params) == expected
    if stage.kill_server is not None:

        def kill() -> None:
            assert stage.kill_server is not None
            stage.kill_server()
            stage.revive()

        stage.workers()
        assert answers(stage, kill, PROMPTS, params) == expected


def test_a_bad_grammar_fails_its_job_alone(stage: EngineStage) -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputs(regex="(("), max_tokens=8)
    for result in results(stage, bad):
        assert result.error is not None and result.error.status == 400
    assert all(result.error is None for result in results(stage, SamplingParams(max_tokens=8)))


def test_an_argument_that_vllm_has_not_is_named() -> None:
    for given, told in (
        ('{"tensor_paralel_size": 2}', "it has tensor_parallel_size"),
        ('{"model": "another"}', "model is a setting of its own: --model"),
        ('{"hf_token": "x"}', "hf_token has no effect, since vLLM is given a folder"),
    ):
        code = (
            "import sys; from penstock.worker.process.settings import WorkerSettings;"
            "from penstock.worker.engine_loader import load_engine;"
            "load_engine(WorkerSettings(model=sys.argv[1], engine='vllm', engine_args=sys.argv[2]))"
        )
        ended = subprocess.run(
            [os.environ["PENSTOCK_TEST_VLLM"], "-c", code, str(BUNDLED_MODEL), given],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": "."},
        )
        assert ended.returncode != 0 and told in ended.stderr

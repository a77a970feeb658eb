"""The queue's promises under each engine. Its readers forgive nothing: see `Reader`."""

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

import pytest
from jsonschema import Draft202012Validator

from engine_stages import PROMPTS, STAGES, THEIRS, EngineStage, Reader, answers
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.account import Account, Quota
from penstock.schemas.event import Failed
from penstock.schemas.job import PriorityClass
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from worker_process import ask, until

TRIED = THEIRS or STAGES


def one(stage: EngineStage, asks: Callable[[QueueClient], Awaitable[None]]) -> None:
    stage.workers()
    ask(stage.url, asks)


def a_killed_worker_costs_a_pause(stage: EngineStage, undisturbed: list[str]) -> None:
    first, _ = stage.workers(2)
    assert answers(stage, first.kill) == undisturbed


def a_frozen_worker_writes_nothing_when_it_comes_back(
    stage: EngineStage, undisturbed: list[str]
) -> None:
    first, second = stage.workers(2)
    took = second.logged().count("handed on")

    def freeze() -> None:
        first.signal_all(signal.SIGSTOP)
        until(lambda: second.logged().count("handed on") > took, "its jobs to be handed on")
        first.signal_all(signal.SIGCONT)

    assert answers(stage, freeze) == undisturbed


def a_worker_that_drains_hands_on_what_is_left(stage: EngineStage, undisturbed: list[str]) -> None:
    first, _ = stage.workers(2)

    def drain() -> None:
        first.process.send_signal(signal.SIGTERM)
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(60) == 0

    assert answers(stage, drain) == undisturbed


def a_server_of_others_that_is_killed_costs_a_pause(
    stage: EngineStage, undisturbed: list[str]
) -> None:
    if stage.kill_server is None:
        return  # there is none
    stage.workers()

    def kill() -> None:
        assert stage.kill_server is not None
        stage.kill_server()
        stage.revive()

    assert answers(stage, kill) == undisturbed


def a_cancelled_job_frees_the_engine(stage: EngineStage, _: list[str]) -> None:
    async def asks(client: QueueClient) -> None:
        job_id = await client.enqueue(PROMPTS[0], params=stage.endless)
        reader = Reader()
        async with asyncio.TaskGroup() as parts:
            parts.create_task(reader.follow(client, job_id))
            await reader.has_read.wait()
            status = await client.status(job_id)
            assert status.resume == ("text" if stage.resumes_text else "tokens")
            await client.cancel(job_id)
        assert isinstance(reader.end, Failed) and reader.end.state == "cancelled"
        again = await client.result(await client.enqueue(PROMPTS[0], params=stage.long))
        assert again is not None and again.state == "succeeded"

    one(stage, asks)
    if stage.running is not None:
        until(lambda: stage.running is None or stage.running() == 0, "the server to be free")


def a_deadline_ends_a_job_that_runs(stage: EngineStage, _: list[str]) -> None:
    async def asks(client: QueueClient) -> None:
        params = stage.endless
        for prompt in PROMPTS:
            job_id = await client.enqueue(prompt, params=params, timeout_ms=1500)
            result = await client.result(job_id)
            assert result is not None
            if result.state != "succeeded":
                assert result.error and result.error.code == "deadline_exceeded"
                assert len(result.choices[0].token_ids) > 0
                return
        raise AssertionError("all answers were short")

    one(stage, asks)


def a_budget_ends_a_job_at_its_last_token(stage: EngineStage, _: list[str]) -> None:
    async def asks(client: QueueClient) -> None:
        for prompt in PROMPTS:
            account = Account(name=prompt, limits=Quota(tokens_per_day=60))
            job_id = await client.enqueue(prompt, params=stage.endless, account=account)
            result = await client.result(job_id)
            assert result and result.state == "succeeded"
            if result.choices[0].finish_reason == "budget":
                assert result.usage.prompt_tokens + result.usage.completion_tokens == 60
                assert result.usage.completion_tokens == len(result.choices[0].token_ids)
                return
        raise AssertionError("no answer was as long as the budget")

    one(stage, asks)


def a_job_that_ends_the_engine_is_the_only_one_that_dies(
    stage: EngineStage, undisturbed: list[str]
) -> None:
    if stage.crash is None:
        return  # no prompt ends it

    async def asks(client: QueueClient) -> None:
        assert stage.crash is not None
        bad = await client.enqueue(stage.crash, params=stage.long, background=True)
        good = [
            await client.enqueue(prompt, params=stage.long, background=True) for prompt in PROMPTS
        ]
        async with asyncio.TaskGroup() as parts:
            watch = parts.create_task(_revive(stage))
            result = await client.result(bad)
            assert result and result.error
            assert (result.state, result.error.code) == ("dead", "worker_crashed")
            results = [await client.result(job_id) for job_id in good]
            watch.cancel()
        assert [each and each.choices[0].text for each in results] == undisturbed

    one(stage, asks)


async def _revive(stage: EngineStage) -> None:
    while True:
        await asyncio.to_thread(stage.revive)
        await asyncio.sleep(0.05)


def a_tenants_flood_and_batches_give_way_to_others(stage: EngineStage, _: list[str]) -> None:
    """The queue decides whose turn it is, so the engine may be any."""
    ended: list[str] = []
    params = stage.long.model_copy(update={"max_tokens": 60})
    line: list[tuple[str, str, PriorityClass]] = [("batch", "one", "batch")] * 6
    line += [("flood", "one", "normal")] * 12 + [("other", "two", "normal")]

    async def asks(client: QueueClient) -> None:
        async def end(name: str, job_id: str, tenant: str) -> None:
            result = await client.result(job_id, tenant=tenant)
            assert result is not None and result.state == "succeeded"
            ended.append(name)

        put_in = []
        for name, tenant, priority_class in line:
            job_id = await client.enqueue(
                PROMPTS[0],
                params=params,
                tenant=tenant,
                priority_class=priority_class,
                background=True,
            )
            put_in.append(end(name, job_id, tenant))
        await asyncio.gather(*put_in)

    stage.workers(1, "--max-num-seqs", "1")
    ask(stage.url, asks)
    assert ended[ended.index("other") :].count("flood") >= 3 and ended[-1] == "batch"


def an_answer_keeps_to_its_schema_through_a_kill(stage: EngineStage, _: list[str]) -> None:
    if not stage.is_ours:
        return  # tests/engines tries what those can do
    word = {
        "type": "object",
        "properties": {"word": {"enum": ["red", "green", "blue"]}},
        "required": ["word"],
        "additionalProperties": False,
    }
    wanted = {"type": "array", "items": word, "minItems": 30, "maxItems": 30}
    params = SamplingParams(
        temperature=1, seed=3, max_tokens=900, structured_outputs=StructuredOutputs(json=wanted)
    )
    first, _ = stage.workers(2)
    made = answers(stage, first.kill, params=params)
    for text in made:
        Draft202012Validator(wanted).validate(json.loads(text))
    stage.workers(1)
    assert answers(stage, lambda: None, params=params) == made


def a_prompt_that_was_read_is_found_again(stage: EngineStage, _: list[str]) -> None:
    if not stage.is_ours:
        return
    prompt, few = " ".join(PROMPTS * 4), SamplingParams(temperature=0, max_tokens=8)

    async def asks(client: QueueClient) -> None:
        found, texts = [], []
        for _ in range(2):
            result = await client.result(await client.enqueue(prompt, params=few))
            assert result is not None and result.usage is not None
            found.append(result.usage.cached_tokens)
            texts.append(result.choices[0].text)
        assert found[0] == 0 < found[1] and texts[0] == texts[1]

    one(stage, asks)


PROMISES = [
    a_killed_worker_costs_a_pause,
    a_frozen_worker_writes_nothing_when_it_comes_back,
    a_worker_that_drains_hands_on_what_is_left,
    a_server_of_others_that_is_killed_costs_a_pause,
    a_cancelled_job_frees_the_engine,
    a_deadline_ends_a_job_that_runs,
    a_budget_ends_a_job_at_its_last_token,
    a_job_that_ends_the_engine_is_the_only_one_that_dies,
    a_tenants_flood_and_batches_give_way_to_others,
    an_answer_keeps_to_its_schema_through_a_kill,
    a_prompt_that_was_read_is_found_again,
]


@pytest.mark.slow
@pytest.mark.parametrize("begin", TRIED.values(), ids=TRIED)
def test_each_promise_holds(begin: Callable[[], AbstractContextManager[EngineStage]]) -> None:
    """One test, since each process of pytest would start the engines of its part anew."""
    with begin() as stage:
        stage.workers()
        undisturbed = answers(stage, lambda: None)
        for promise in PROMISES:
            promise(stage, undisturbed)

"""A worker as a whole, with real processes on a real Redis: what a caller sees of it."""

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import JsonValue

from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.errors import PromptTooLong
from penstock.schemas.event import Delta, Failed
from penstock.schemas.job import Message
from penstock.schemas.params.sampling import SamplingParams
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.worker.bundled.paths import BUNDLED_DRAFT
from penstock.worker.llm import LLM
from plain import plain
from worker_process import WorkerProcess, ask, same

LONG = "and so it went on"


@pytest.fixture(scope="module")
def worker(server: Server) -> Iterator[WorkerProcess]:
    """One for all tests that do not end it."""
    with WorkerProcess(
        server.url, "fake", "--max-model-len", "400", "--max-num-seqs", "8"
    ) as worker:
        yield worker.ready()


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The same engine, undisturbed, with no queue around it."""
    return LLM("fake", load_format="fake", max_model_len=400, fake_step_ms=0)


JOBS = {
    "plain": SamplingParams(max_tokens=60, seed=3),
    "to its own end": SamplingParams(max_tokens=None, seed=5),
    "three choices": SamplingParams(max_tokens=60, seed=3, n=3),
    "a stop string over tokens": SamplingParams(max_tokens=300, seed=3, stop=["up a"]),
    "a stop string with unicode": SamplingParams(
        max_tokens=300, seed=4, stop=["🚀🚀", "日本"], include_stop_str_in_output=True
    ),
    "a stop id": SamplingParams(max_tokens=300, seed=3, stop_token_ids=[ord("q"), ord("u")]),
    "log probabilities": SamplingParams(max_tokens=20, seed=3, logprobs=2),
    "no end": SamplingParams(max_tokens=250, seed=5, ignore_eos=True, min_tokens=100, stop=["e"]),
}


@pytest.mark.parametrize("params", JOBS.values(), ids=JOBS)
def test_a_job_is_answered_as_the_engine_would_answer_alone(worker, llm, params):
    async def asks(client: QueueClient) -> None:
        job_id = await client.enqueue("Tell me of water 🌊", params=params)
        deltas = [event async for event in client.stream(job_id)]
        done = deltas.pop()
        result = await client.result(job_id)
        [expected] = llm.generate("Tell me of water 🌊", params)
        same(result, expected)
        assert done.type == "done"
        position = 0
        for delta in deltas:
            assert isinstance(delta, Delta) and delta.position == position
            position = delta.end
        for index, choice in enumerate(expected.outputs):
            assert "".join(each.text for each in deltas if each.index == index) == choice.text
        assert done.usage.prompt_tokens == len(expected.prompt_token_ids)
        assert done.usage.completion_tokens == position

    ask(worker.url, asks)


def test_without_a_seed_the_jobs_id_is_one(worker, llm):
    """So that every attempt at the job draws the same."""

    async def asks(client: QueueClient) -> None:
        job_id = await client.enqueue(LONG, params=SamplingParams(max_tokens=40))
        seed = int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=7).digest(), "big")
        expected = llm.generate(LONG, SamplingParams(max_tokens=40, seed=seed))
        same(await client.result(job_id), expected[0])

    ask(worker.url, asks)


def test_several_prompts_are_one_job_with_choices_in_order(worker):
    async def asks(client: QueueClient) -> None:
        params = SamplingParams(n=2, max_tokens=30, seed=9, ignore_eos=True)
        job_id = await client.enqueue(["first", "second"], params=params)
        result = await client.result(job_id)
        again = await client.result(await client.enqueue("first", params=params))
        assert [choice.index for choice in result.choices] == [0, 1, 2, 3]
        assert len({choice.text for choice in result.choices}) == 4
        assert [each.text for each in result.choices[:2]] == [each.text for each in again.choices]
        assert result.usage.prompt_tokens == len("first") + len("second")

    ask(worker.url, asks)


def test_a_conversation_is_rendered_by_the_models_template(worker, llm):
    messages: list[Message] = [
        {"role": "user", "content": [{"type": "text", "text": "Grüße"}]},
    ]
    params = SamplingParams(max_tokens=40, seed=1)

    async def asks(client: QueueClient) -> None:
        result = await client.result(await client.enqueue(messages=messages, params=params))
        same(result, llm.chat(messages, params)[0])
        same(result, llm.generate("user: Grüße\nassistant: ", params)[0])

    ask(worker.url, asks)


BAD: dict[str, tuple[dict[str, object], str, str]] = {
    "a prompt too long": ({"prompt": "x" * 400}, "context_length_exceeded", "prompt"),
    "a conversation too long": (
        {"messages": [{"role": "user", "content": "x" * 400}]},
        "context_length_exceeded",
        "messages",
    ),
    "prompt and completion too long": (
        {"prompt": "x" * 300, "params": SamplingParams(max_tokens=200)},
        "invalid_value",
        "max_tokens",
    ),
    "one bad prompt of two": ({"prompt": [[1, 2], [99999]]}, "invalid_value", "prompt"),
    "ids out of the vocabulary": ({"prompt": [1, 2, 258]}, "invalid_value", "prompt"),
    "a biased id out of the vocabulary": (
        {"prompt": "x", "params": SamplingParams(logit_bias={258: 1.0})},
        "invalid_value",
        "logit_bias",
    ),
    "a stop id out of the vocabulary": (
        {"prompt": "x", "params": SamplingParams(stop_token_ids=[2**31 - 1])},
        "invalid_value",
        "stop_token_ids",
    ),
    "a message without a role": ({"messages": [{"content": "x"}]}, "invalid_value", "messages"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "invalid_value",
        "messages",
    ),
    "a call that is no object": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]},
        "invalid_value",
        "messages",
    ),
}


@pytest.mark.parametrize(("asked", "code", "param"), BAD.values(), ids=BAD)
def test_what_can_never_run_fails_by_name_and_disturbs_nothing(worker, llm, asked, code, param):
    async def asks(client: QueueClient) -> None:
        good_params = SamplingParams(max_tokens=100, seed=8, ignore_eos=True)
        good = await client.enqueue(LONG, params=good_params)
        bad = await client.enqueue(**asked)
        [event] = [event async for event in client.stream(bad)]
        assert isinstance(event, Failed) and event.state == "failed"
        assert (event.error.code, event.error.status, event.error.param) == (code, 400, param)
        assert param in event.error.message and not event.error.retryable
        same(await client.result(good), llm.generate(LONG, good_params)[0])

    ask(worker.url, asks)


def test_ids_that_no_worker_could_take_never_reach_the_queue(worker):
    async def asks(client: QueueClient) -> None:
        with pytest.raises(PromptTooLong, match="maximum context length is 400 tokens"):
            await client.enqueue([1] * 500)
        cut = SamplingParams(truncate_prompt_tokens=5, max_tokens=1)
        result = await client.result(await client.enqueue([1] * 500, params=cut))
        assert result.usage.prompt_tokens == 5

    ask(worker.url, asks)


def test_a_cancelled_job_stops_in_the_middle_and_frees_the_engine(worker):
    async def asks(client: QueueClient) -> None:
        params = SamplingParams(max_tokens=380, ignore_eos=True, n=8)
        before = await is_idle(client)
        job_id = await client.enqueue(LONG, params=params)
        events = []
        async for event in client.stream(job_id):
            events.append(event)
            if len(events) == 10:
                await client.cancel(job_id)
        end = events[-1]
        assert isinstance(end, Failed) and (end.state, end.error.code) == ("cancelled", "cancelled")
        assert end.usage.completion_tokens == end.position < 8 * 300
        assert await is_idle(client) - before < 8 * 300

    ask(worker.url, asks)


async def is_idle(client: QueueClient) -> int:
    """Once nothing runs: the number of tokens that the engine has made in its life."""
    [queue] = await client.queues()
    while True:
        [status] = await queue.workers()
        if status.stats.get("num_running") == 0 and status.stats.get("num_held_blocks") == 0:
            return int(str(status.stats["generation_tokens"]))
        await asyncio.sleep(0.05)


def test_a_deadline_ends_a_job_in_the_middle(worker):
    async def asks(client: QueueClient) -> None:
        params = SamplingParams(max_tokens=380, ignore_eos=True, n=8)
        job_id = await client.enqueue(LONG, params=params, timeout_ms=150)
        end = [event async for event in client.stream(job_id)][-1]
        assert isinstance(end, Failed) and end.state == "expired"
        assert end.error.status == 504 and "timeout_ms" in end.error.message
        await is_idle(client)

    ask(worker.url, asks)


def test_no_more_is_read_than_there_is_room_for(worker):
    """Eight sequences: the ninth job is left in the queue, where another worker could take it."""

    async def asks(client: QueueClient) -> None:
        params = SamplingParams(max_tokens=300, ignore_eos=True)
        [queue] = await client.queues()
        while not (await queue.workers())[0].stats:  # they come with the first beat
            await asyncio.sleep(0.05)
        jobs = [await client.enqueue(f"{LONG} {n}", params=params) for n in range(24)]
        seen: set[tuple[JsonValue, JsonValue]] = set()
        while (counts := await queue.counts()).num_queued + counts.num_running:
            [status] = await queue.workers()
            seen.add((status.stats.get("num_running"), status.stats.get("num_waiting")))
        assert (8, 0) in seen and {waiting for _, waiting in seen} == {0}
        assert {(await client.result(each)).state for each in jobs} == {"succeeded"}

    ask(worker.url, asks)


def test_neither_process_loads_torch(worker):
    for module in ("penstock.worker.jobs.service", "penstock.worker.engine_process"):
        mapped = Path(f"/proc/{worker.child(module)}/maps").read_text()
        assert ("libtorch" not in mapped and "libpython" in mapped) or "python" in mapped


def test_the_log_holds_no_prompt_and_no_answer(worker, llm):
    canary, params = "CANARY-3141", SamplingParams(max_tokens=30, seed=2, ignore_eos=True)

    async def asks(client: QueueClient) -> None:
        await client.result(await client.enqueue(canary, params=params))
        bad = await client.enqueue(messages=[{"role": "user", "content": [{"type": canary}]}])
        await client.result(bad)

    ask(worker.url, asks)
    answer = llm.generate(canary, params)[0].outputs[0].text
    assert canary not in worker.logged() and answer[:16] not in worker.logged()


def test_its_card_and_the_models_are_registered(worker):
    async def asks(client: QueueClient) -> None:
        card = (await client.models())["fake"]
        assert (card.max_model_len, card.lanes) == (400, 1)
        [queue] = await client.queues()
        while not (status := (await queue.workers())[0]).stats:  # they come with the first beat
            await asyncio.sleep(0.05)
        assert status.card.max_num_seqs == 8 and not status.card.draining
        assert status.card.fingerprint == card.fingerprint != ""
        assert status.stats["num_blocks"] == 8 * 400 // 16

    ask(worker.url, asks)


REFUSED = {
    "no such folder": (["--model", "./nowhere"], 3, "nowhere"),
    "bits that the engine cannot give": (
        ["--model", str(BUNDLED_DRAFT), "--quantization", "int8"],
        3,
        "a width of the model is 352",
    ),
    "no model": ([], 2, "--model"),
    "a block of nothing": (["--model", "m", "--block-size", "0"], 2, "--block-size"),
    "a word for a number": (["--model", "m", "--max-num-seqs", "many"], 2, "--max-num-seqs"),
}


@pytest.mark.parametrize(("words", "status", "says"), REFUSED.values(), ids=REFUSED)
def test_settings_that_cannot_work_are_refused_in_a_line(server, words, status, says):
    command = [
        sys.executable,
        "-m",
        "penstock.worker.supervisor.cli",
        "--redis-url",
        server.url,
        *words,
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == status
    assert says in run.stderr and "Traceback" not in run.stderr


def test_a_job_that_redis_takes_for_a_workers_and_it_does_not_know_is_handed_on(worker, llm):
    """As after a failover that lost a job's end, or a claim's reply."""

    async def asks(client: QueueClient) -> None:
        [queue] = await client.queues()
        [status] = await queue.workers()
        params = SamplingParams(max_tokens=10, seed=3)
        taking, delayed = WorkerQueue(client.redis, queue.lane), f"{queue.lane.prefix}delayed"
        for _ in range(5):  # the worker itself may look at this very moment, and have it first
            job_id = await client.enqueue(
                "hello", params=params, background=True, delay_ms=3_600_000
            )
            await plain(client.redis).zadd(delayed, {job_id: 0})
            if taken := await taking.read(status.worker, 1):
                break
        assert [entry.job_id for entry in taken or []] == [job_id]
        (expected,) = llm.generate(["hello"], params)
        same(await client.result(job_id), expected)

    ask(worker.url, asks)

"""A small real model: every process is killed, and the text is the one of an undisturbed run."""

import asyncio
import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import redis
from transformers import AutoTokenizer

import judges
import tokenizers_made
from faults.invariants import check_ledger, check_leftovers, check_logs, wait_until_idle
from faults.processes import PATIENCE_S, System
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.delivery import Started
from penstock.schemas.event import EVENT, Delta, Result
from penstock.schemas.job import Job
from penstock.schemas.keys import Lane
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from penstock.worker.engine.any_engine import AnyEngine
from penstock.worker.engine_loader import load_engine
from penstock.worker.jobs.active_job import ActiveJob
from penstock.worker.jobs.consumer import Intake
from penstock.worker.llm import LLM, RequestOutput
from penstock.worker.process.sampling_defaults import Generation
from penstock.worker.process.settings import WorkerSettings
from penstock.worker.text.model_tokenizer import ModelTokenizer, load_tokenizer
from worker_process import same

KV = 30_000_000
SCHEMA = StructuredOutputs(
    json_schema={
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "kind": {"enum": ["fish", "bird"]},
        },
        "required": ["name", "kind"],
    }
)
KINDS = {
    "plain": SamplingParams(temperature=0, max_tokens=12),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, top_k=40, max_tokens=12),
    "a schema": SamplingParams(structured_outputs=SCHEMA, max_tokens=40),
    "three choices": SamplingParams(n=3, max_tokens=8),
}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    judges.build("llama").bfloat16().save_pretrained(folder)
    return tokenizers_made.save(tokenizers_made.byte_level(), folder)


@pytest.mark.slow
@pytest.mark.timeout(400)  # 40 s alone; two models are loaded, one more after the kill
def test_all_processes_and_redis_are_killed_in_the_middle_of_200_jobs(judge):
    """They are put in and read over HTTP. Who comes after the kill computes what was logged once
    more, and draws only what was not."""
    asked = [
        (f"{name} {number}", params.model_copy(update={"seed": number}))
        for number in range(50)
        for name, params in KINDS.items()
    ]
    alone = LLM(str(judge), deterministic=True, kv_cache_memory_bytes=KV, max_num_seqs=64)
    expected = alone.generate([each[0] for each in asked], [each[1] for each in asked])
    total = sum(len(each.token_ids) for output in expected for each in output.outputs)
    flags = ("--deterministic", "--kv-cache-memory-bytes", str(KV), "--max-num-seqs", "64")
    lane = Lane(judge.name)
    with System(model=judge, appendfsync="always") as system, system.telling():
        system.worker(*flags)
        system.gateway()
        system.housekeeping()
        system.ready()
        job_ids = submit_http(system, asked)
        until_made(system, lane, total // 3)
        for process in system.processes:
            process.kill()
        system.server.kill()
        system.start_server()
        with redis.Redis.from_url(system.url) as store:
            left = left_to_do(store, lane, dict(zip(job_ids, expected, strict=True)))
        for process in system.processes:
            system.replace(process, *(flags if process in system.workers else ()))
        with redis.Redis.from_url(system.url) as store:
            wait_until_idle(store, lane, 200)
            check_logs(store, lane, job_ids)
            check_ledger(store, lane, job_ids, Counter())
            check_leftovers(store, lane)
        system.ready()
        for result, output in zip(results_http(system, job_ids), expected, strict=True):
            same(result, output)
        done = asyncio.run(work_done(system, left))
        # A suspect that passed its trial makes room for the next one's, and is read once more.
        told = "".join(worker.logged() for worker in system.workers)
        num_handed_back = sum(map(int, re.findall(r"handed back (\d+) jobs", told)))
        longest = max(
            len(output.prompt_token_ids) + sum(len(each.token_ids) for each in output.outputs)
            for output in expected
        )
        slack = num_handed_back * longest
        assert left.num_read <= done.num_read <= left.num_read + slack
        assert left.num_drawn <= done.num_drawn <= left.num_drawn + slack


def submit_http(system: System, asked: list[tuple[str, SamplingParams]]) -> list[str]:
    with httpx.Client(base_url=system.gateway_urls()[0], timeout=PATIENCE_S) as http:
        ids = []
        for prompt, params in asked:
            body = {
                "model": system.name,
                "prompt": prompt,
                "params": params.model_dump(by_alias=True),
            }
            reply = http.post("/v1/jobs", json=body | {"background": True})
            assert reply.status_code == 202, reply.text
            ids.append(reply.json()["id"])
        return ids


def results_http(system: System, job_ids: list[str]) -> list[Result]:
    with httpx.Client(base_url=system.gateway_urls()[0], timeout=PATIENCE_S) as http:
        replies = [http.get(f"/v1/jobs/{job_id}") for job_id in job_ids]
        return [Result.model_validate(reply.json()["result"]) for reply in replies]


@dataclass(frozen=True, slots=True)
class Work:
    """Of one worker's engine: tokens that it computed or found in its cache, and that it drew."""

    num_read: int
    num_drawn: int


def left_to_do(store: redis.Redis, lane: Lane, jobs: dict[str, RequestOutput]) -> Work:
    """What the logs leave: every token but a sequence's last is read once, prompts too."""
    num_read = num_drawn = 0
    for job_id, output in jobs.items():
        log = [
            EVENT.validate_json(fields[b"e"])
            for _, fields in store.xrange(f"{lane.job(job_id)}:log")
        ]
        for index, choice in enumerate(output.outputs):
            made = [each for each in log if isinstance(each, Delta) and each.index == index]
            if made and made[-1].finish_reason is not None:
                continue
            num_read += len(output.prompt_token_ids) + len(choice.token_ids) - 1
            num_drawn += len(choice.token_ids) - sum(len(each.token_ids) for each in made)
    return Work(num_read, num_drawn)


async def work_done(system: System, expected: Work) -> Work:
    """As the worker tells it, at least what is expected; its last beat may be some time ago."""
    async with QueueClient.from_url(system.url) as client:
        [queue] = await client.queues()
        found = Work(0, 0)
        for _ in range(100):
            [status] = await queue.workers()
            counts = Counter(status.stats)
            found = Work(
                counts["computed_tokens"] + counts["cached_tokens"], counts["generation_tokens"]
            )
            if found.num_read >= expected.num_read and found.num_drawn >= expected.num_drawn:
                break
            await asyncio.sleep(0.1)
        return found


async def submit(system: System, asked: list[tuple[str, SamplingParams]]) -> list[str]:
    async with QueueClient.from_url(system.url) as client:
        return [
            await client.enqueue(prompt, params=params, background=True) for prompt, params in asked
        ]


async def results(system: System, job_ids: list[str]) -> list[Result | None]:
    async with QueueClient.from_url(system.url) as client:
        return [await client.result(job_id, wait=False) for job_id in job_ids]


def until_made(system: System, lane: Lane, num_tokens: int) -> None:
    """That many tokens are logged."""
    give_up = time.monotonic() + PATIENCE_S
    with redis.Redis.from_url(system.url) as store:
        keys = [key for key in store.scan_iter(f"{lane.prefix}job:*") if key.count(b":") == 4]
        while time.monotonic() < give_up:
            pipeline = store.pipeline(transaction=False)
            for key in keys:
                pipeline.hget(key, "position")
            if sum(int(position or 0) for position in pipeline.execute()) >= num_tokens:
                return
            time.sleep(0.05)
    raise AssertionError(f"{num_tokens} tokens were not made in time")


CUT = {
    "unicode and stop strings": SamplingParams(
        max_tokens=24, seed=3, ignore_eos=True, stop=["never there", "\n\n"]
    ),
    "a schema": SamplingParams(structured_outputs=SCHEMA, max_tokens=40, seed=5),
    "penalties": SamplingParams(
        max_tokens=20, seed=6, presence_penalty=1, frequency_penalty=0.5, repetition_penalty=1.3
    ),
    "log probabilities": SamplingParams(max_tokens=20, seed=7, logprobs=3, ignore_eos=True),
    "three choices": SamplingParams(n=3, max_tokens=14, seed=8),
    "two choices of a schema with log probabilities": SamplingParams(
        n=2, structured_outputs=SCHEMA, max_tokens=40, seed=10, logprobs=4
    ),
}


@pytest.fixture(scope="module")
def engine(judge: Path) -> tuple[AnyEngine, Intake]:
    return engine_of(judge)


def engine_of(judge: Path, **changes: object) -> tuple[AnyEngine, Intake]:
    settings = WorkerSettings(
        model=str(judge),
        deterministic=True,
        kv_cache_memory_bytes=2 * KV,
        max_num_seqs=64,
        **changes,
    )
    engine = load_engine(settings)
    return engine, Intake(settings, load_tokenizer(settings), engine.limits, Generation({}))


@pytest.mark.parametrize("params", CUT.values(), ids=CUT)
def test_cut_at_every_position_the_rest_is_the_same(engine, judge, params):
    """Each worker has the log up to some event and nothing else; all go on to one same answer."""
    job = Job(
        job_id=Lane(judge.name).new_job_id(), model=judge.name, prompts=["€🙂"], params=params
    )
    [whole] = told(engine, job, [[]])
    assert len(whole) > 8
    for cut, rest in enumerate(told(engine, job, [whole[:at] for at in range(len(whole) + 1)])):
        assert by_choice(rest) == by_choice(whole), f"cut after {cut} events"


@pytest.mark.parametrize("dtype, tokens", [("bfloat16", 33), ("float32", 64)])
def test_a_worker_whose_steps_are_shorter_goes_on_with_the_same_bits(judge, dtype, tokens):
    """How many tokens a step has depends on how fast a worker's machine is."""
    longer = engine_of(judge, dtype=dtype, max_num_batched_tokens=512)
    shorter = engine_of(judge, dtype=dtype, max_num_batched_tokens=tokens)
    params = SamplingParams(n=2, seed=9, logprobs=3, max_tokens=12, ignore_eos=True)
    prompts = ["A long prompt is read in slices: " + "each a part of it. " * 12, "€🙂"]
    job_id = Lane(judge.name).new_job_id()
    job = Job(job_id=job_id, model=judge.name, prompts=prompts, params=params)
    [whole] = told(longer, job, [[]])
    for cut, rest in enumerate(told(shorter, job, [whole[:at] for at in range(len(whole))])):
        assert by_choice(rest) == by_choice(whole), f"cut after {cut} events"


def test_cut_at_every_position_each_choice_goes_on_from_its_own_prompts_text(
    engine, judge, tmp_path
):
    """A tokenizer as Llama 2 has it strips the first space of a text, and none of a completion."""
    runner, intake = engine
    folder = tokenizers_made.save(tokenizers_made.byte_fallback(), tmp_path)
    spaced = runner, replace(intake, text=ModelTokenizer(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = dict.fromkeys(tokenizer.convert_tokens_to_ids(["▁the", "▁fox"]), 50.0)
    params = SamplingParams(n=2, max_tokens=10, seed=3, logit_bias=words)
    prompts = ["a b", [1, 2], "a"]  # the second has no text
    job = Job(job_id=Lane("m").new_job_id(), model="m", prompts=prompts, params=params)
    [whole] = told(spaced, job, [[]])
    for cut, rest in enumerate(told(spaced, job, [whole[:at] for at in range(len(whole) + 1)])):
        assert by_choice(rest) == by_choice(whole), f"cut after {cut} events"
    for index, (ids, text, *_) in by_choice(whole).items():
        prompt = prompts[index // 2]
        before = prompt if isinstance(prompt, list) else tokenizer.encode(prompt)
        told_before, both = tokenizer.batch_decode([before, before + ids], skip_special_tokens=True)
        assert both == told_before + text
        assert text.startswith(" ") == (prompt != [1, 2])


def told(engine: tuple[AnyEngine, Intake], job: Job, logs: list[list[Delta]]) -> list[list[Delta]]:
    """The job from the end of each log on, all at once: one delta a token."""
    runner, intake = engine
    actives: dict[str, ActiveJob] = {}
    every = []
    for number, log in enumerate(logs):
        started = Started(job, number + 1, log, left_ms=None, waited_ms=0)
        active = asyncio.run(intake.prepare(started))
        assert active.deltas == log
        every.append(active)
        for addition in intake.additions(active):
            own = [delta for delta in log if delta.index == addition.choice]
            assert addition.completion == [token for delta in own for token in delta.token_ids]
            actives[addition.seq_id] = active
            runner.add(addition)
    give_up = time.monotonic() + PATIENCE_S
    while not all(active.is_over for active in every):
        assert time.monotonic() < give_up
        runner.wait(0.1)  # for a grammar to be compiled
        for output in runner.step():
            assert output.error is None, output.error
            if actives[output.seq_id].take(int(output.seq_id.rsplit(":", 1)[1]), output):
                runner.cancel(output.seq_id)
        for active in every:
            active.note_committed(active.commit())
    while runner.busy:
        runner.step()
    return [active.deltas for active in every]


def by_choice(deltas: list[Delta]) -> dict[int, tuple[object, ...]]:
    """What a reader has in the end of each choice."""
    found = {}
    for index in {delta.index for delta in deltas}:
        own = [delta for delta in deltas if delta.index == index]
        ids = [token for delta in own for token in delta.token_ids]
        probs = [each for delta in own for each in delta.logprobs or []]
        text = "".join(delta.text for delta in own)
        found[index] = (ids, text, probs, own[-1].finish_reason, own[-1].stop_reason)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_more_jobs_than_kv_blocks_take_turns_and_end_whole(judge):
    """Sequences outgrow what was expected of them: some are preempted, none is lost or changed."""
    params = SamplingParams(n=4, max_tokens=90, ignore_eos=True)
    asked = [(f"long {number}", params.model_copy(update={"seed": number})) for number in range(4)]
    alone = LLM(str(judge), deterministic=True, kv_cache_memory_bytes=KV)
    expected = alone.generate([each[0] for each in asked], [each[1] for each in asked])
    with System(model=judge) as system, system.telling():
        worker = system.worker("--deterministic", "--num-gpu-blocks-override", "24")
        worker.ready()
        job_ids = asyncio.run(submit(system, asked))
        with redis.Redis.from_url(system.url) as store:
            wait_until_idle(store, system.lane, 200)
        for result, output in zip(asyncio.run(results(system, job_ids)), expected, strict=True):
            same(result, output)
        assert asyncio.run(num_preemptions(system)) > 0


async def num_preemptions(system: System) -> int:
    """As the worker's next beat tells it."""
    async with QueueClient.from_url(system.url) as client:
        [queue] = await client.queues()
        for _ in range(300):
            [status] = await queue.workers()
            if count := status.stats.get("num_preemptions"):
                assert isinstance(count, int)
                return count
            await asyncio.sleep(0.1)
    return 0

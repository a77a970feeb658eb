"""Workers are killed at random, and every job ends once, with the text of an undisturbed run."""

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

import judges
import tokenizers_made
from compose.server import Server
from gateway.client import Client
from schemas.event import EVENT, Delta, Result
from schemas.keys import Lane
from schemas.sampling import SamplingParams, StructuredOutputs
from worker.llm import LLM
from worker_process import WorkerProcess, ask, same

Asked = tuple[str, SamplingParams]


@pytest.fixture
def fresh() -> Iterator[Server]:
    with Server() as server:
        yield server


def kill_some_of(worker: WorkerProcess, chance: random.Random) -> bool:
    """-9 to all of a worker or to one of its processes; whether it needs a successor."""
    target = chance.choice(["all", "supervisor", "worker.service", "worker.engine_process"])
    try:
        if target == "all":
            worker.kill()
        elif target == "supervisor":
            os.kill(worker.process.pid, signal.SIGKILL)
        else:
            os.kill(worker.child(target), signal.SIGKILL)
    except (AssertionError, OSError):  # it is just being started again after an earlier kill
        worker.kill()
        return True
    return target in ("all", "supervisor")


class Crews:
    """Some workers of one model, each replaced when it is killed for good."""

    def __init__(self, url: str, model: str | Path, count: int, *flags: str) -> None:
        self._new = lambda: WorkerProcess(url, model, *flags)
        self.workers = [self._new() for _ in range(count)]
        self._gone: list[WorkerProcess] = []

    def kill_one(self, chance: random.Random) -> None:
        place = chance.randrange(len(self.workers))
        if kill_some_of(self.workers[place], chance):
            self._gone.append(self.workers[place])
            self.workers[place] = self._new()

    def end(self) -> None:
        for worker in self.workers + self._gone:
            worker.__exit__(None, None, None)


@contextmanager
def kept_logs(url: str) -> Iterator[None]:
    """Logs outlive their minute, so that `check_logs` finds them however slow the machine is."""
    is_over = threading.Event()

    def keep() -> None:
        with redis.Redis.from_url(url) as client:
            while not is_over.wait(2):
                for key in client.scan_iter("*:log", count=1000):
                    client.persist(key)

    keeping = threading.Thread(target=keep)
    keeping.start()
    try:
        yield
    finally:
        is_over.set()
        keeping.join()


async def made(client: Client, jobs: Sequence[str]) -> int:
    """Tokens that readers were shown so far."""
    return sum([(await client.status(job_id)).num_tokens for job_id in jobs])


async def run_among_kills(
    client: Client, crews: Crews, asked: list[Asked], total: int, num_kills: int, seed: int
) -> list[Result | None]:
    """Each kill comes when another share of the tokens, on average the same, has been made."""
    chance = random.Random(seed)
    jobs = [
        await client.enqueue(prompt, params=params, background=True) for prompt, params in asked
    ]
    for threshold in sorted(chance.randrange(total * 9 // 10) for _ in range(num_kills)):
        while await made(client, jobs) <= threshold:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(crews.kill_one, chance)
    return [await client.result(job_id) for job_id in jobs]


def check_logs(url: str, model: str, num_jobs: int) -> None:
    """One end a job, at the end; no gap, no repeat; nothing left claimed or waiting."""
    prefix = Lane(model).prefix
    with redis.Redis.from_url(url, decode_responses=True) as client:
        logs = list(client.scan_iter(f"{prefix}job:*:log", count=1000))
        assert len(logs) == num_jobs
        for key in logs:
            events = [EVENT.validate_json(fields["e"]) for _, fields in client.xrange(key)]
            position = 0
            for event in events:
                assert event.position == position
                position += len(event.token_ids) if isinstance(event, Delta) else 0
            assert [event.type for event in events if event.type != "delta"] == ["done"]
            assert events[-1].type == "done"
        assert client.hget(f"{prefix}counts", "ended") == str(num_jobs)
        for ready in ("resume", "high", "normal", "batch"):
            assert client.xlen(f"{prefix}ready:{ready}") == 0


def test_a_hundred_jobs_survive_ten_kills(fresh):
    kinds = [
        SamplingParams(max_tokens=120, ignore_eos=True),
        SamplingParams(max_tokens=None),
        SamplingParams(max_tokens=60, n=3),
        SamplingParams(max_tokens=200, stop=["🚀🚀", "dams an"]),
        SamplingParams(max_tokens=150, min_tokens=50, stop=["e"], ignore_eos=True),
        SamplingParams(max_tokens=40, logprobs=3),
    ]
    asked = [
        (f"job {number} 🌊", kinds[number % len(kinds)].model_copy(update={"seed": number}))
        for number in range(100)
    ]
    alone = LLM("fake", load_format="fake", max_model_len=600, fake_step_ms=0)
    expected = alone.generate([each[0] for each in asked], [each[1] for each in asked])
    total = sum(len(each.token_ids) for output in expected for each in output.outputs)
    flags = ("--max-model-len", "600", "--fake-step-ms", "20", "--max-num-seqs", "24")
    crews = Crews(fresh.url, "fake", 2, *flags)
    try:

        async def asks(client: Client) -> None:
            await asyncio.to_thread(crews.workers[0].ready)
            results = await run_among_kills(client, crews, asked, total, 10, seed=1)
            for result, output in zip(results, expected, strict=True):
                same(result, output)

        with kept_logs(fresh.url):
            ask(fresh.url, asks)
        check_logs(fresh.url, "fake", len(asked))
    finally:
        crews.end()


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    judges.save("llama", folder)
    return tokenizers_made.save(tokenizers_made.byte_level(), folder)


SCHEMA = StructuredOutputs(
    json_schema={
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer"},
            "kind": {"enum": ["fish", "bird"]},
        },
        "required": ["name", "age", "kind"],
    }
)
REAL = {
    "greedy": SamplingParams(temperature=0, max_tokens=60),
    "seeded": SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=5, max_tokens=60),
    "penalised": SamplingParams(
        temperature=1, seed=6, presence_penalty=1, repetition_penalty=1.2, max_tokens=60
    ),
    "a schema": SamplingParams(temperature=1, seed=7, structured_outputs=SCHEMA, max_tokens=80),
    "stop strings": SamplingParams(temperature=1, seed=8, stop=["qqq", "\n\n"], max_tokens=60),
    "two choices": SamplingParams(temperature=1, seed=9, n=2, max_tokens=50, logprobs=2),
    "no end": SamplingParams(temperature=1, seed=10, ignore_eos=True, max_tokens=80),
}


def test_a_hundred_jobs_of_a_real_model_survive_ten_kills(fresh, judge):
    asked = [
        (f"{name} {number}", params.model_copy(update={"seed": number}))
        for number in range(15)
        for name, params in REAL.items()
    ][:100]
    settings = {"deterministic": True, "kv_cache_memory_bytes": 30_000_000, "max_num_seqs": 8}
    alone = LLM(str(judge), **settings)
    expected = alone.generate([each[0] for each in asked], [each[1] for each in asked])
    total = sum(len(each.token_ids) for output in expected for each in output.outputs)
    flags = ("--deterministic", "--kv-cache-memory-bytes", "30000000", "--max-num-seqs", "8")
    crews = Crews(fresh.url, judge, 2, *flags)
    try:

        async def asks(client: Client) -> None:
            await asyncio.to_thread(crews.workers[0].ready)
            results = await run_among_kills(client, crews, asked, total, 10, seed=2)
            for result, output in zip(results, expected, strict=True):
                same(result, output)

        with kept_logs(fresh.url):
            ask(fresh.url, asks)
        check_logs(fresh.url, judge.name, len(asked))
    finally:
        crews.end()

"""A worker of three names, its jobs by each way in: every figure is what was made, once."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.metrics import names
from plain_redis import Plain
from stage import GatewayProcess, HousekeepingProcess, eventually
from worker_process import WorkerProcess

ALIASES = ("first", "second", "third")
ASKED, IDLE = "second", "third"
PROMPT, NUM_PROMPT, NUM_MADE = "0123456789", 10, 20
BODY = {"prompt": PROMPT, "max_tokens": NUM_MADE, "ignore_eos": True}
EVERY_WAY = ["http", "stream", "jobs", "sdk", "plain", "batch"]


class House:
    """A gateway, housekeeping and one worker; `make` asks for one job by each way in."""

    def __init__(self, server: Server, gateway: GatewayProcess) -> None:
        self.redis_url, self.url = server.url, gateway.url

    def make(self) -> None:
        body = BODY | {"model": ASKED}
        for stream in (False, True):
            asked = httpx.post(f"{self.url}/v1/completions", json=body | {"stream": stream})
            assert asked.status_code == 200
        assert httpx.post(f"{self.url}/v1/jobs", json=body).status_code == 202
        asyncio.run(self._by_sdk())
        self._by_plain_redis()
        line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
        with OpenAI(base_url=f"{self.url}/v1", api_key="none") as client:
            content = json.dumps(line).encode()
            file = client.files.create(file=("in.jsonl", content), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            eventually(lambda: client.batches.retrieve(batch.id).status == "completed", within_s=60)

    def _by_plain_redis(self) -> None:
        plain, channel = Plain(self.redis_url, ASKED), "replies-of-my-service"
        job_id, params = plain.new_id(), {"max_tokens": NUM_MADE, "ignore_eos": True}
        with plain.redis.pubsub() as pubsub:
            pubsub.subscribe(channel)
            pubsub.get_message(timeout=60)
            told = plain.enqueue(job_id, channel, prompts=[PROMPT], params=params)
            assert told[0] == "accepted"
            assert plain.events(pubsub, job_id)[-1]["type"] == "done"

    async def _by_sdk(self) -> None:
        async with QueueClient.from_url(self.redis_url) as client:
            job_id = await client.enqueue(PROMPT, model=ASKED, max_tokens=NUM_MADE, ignore_eos=True)
            await client.result(job_id)

    def samples(self, name: str, **labels: str) -> list[float]:
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        lines = [each for one in text_string_to_metric_families(text) for each in one.samples]
        found = [each for each in lines if each.name == name]
        return [each.value for each in found if labels.items() <= each.labels.items()]

    def value(self, name: str, **labels: str) -> float:
        return sum(self.samples(name, **labels))

    def page(self) -> dict[str, Any]:
        seen: dict[str, Any] = httpx.get(f"{self.url}/v1/status", timeout=60).json()
        return seen

    def top(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "penstock.compose.cli", "top", "--json"]
        command += ["--redis-url", self.redis_url]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
        seen: dict[str, Any] = json.loads(shown.stdout)
        return seen


@pytest.fixture(scope="module")
def house(server: Server, files: tuple[str, str]) -> Iterator[House]:
    flags = ("--served-model-name", ",".join(ALIASES), "--num-lanes", "2", "--fake-step-ms", "10")
    with (
        GatewayProcess(server.url, *files) as gateway,
        HousekeepingProcess(server.url, *files),
        WorkerProcess(server.url, "fake", *flags) as worker,
    ):
        worker.ready()
        house = House(server, gateway)
        house.make()
        ended = "vllm:request_prompt_tokens_count"
        eventually(lambda: house.value(ended, model_name=ASKED) >= len(EVERY_WAY), within_s=20)
        yield house


@pytest.mark.parametrize(
    "name",
    [
        names.TTFT_SECONDS,
        names.E2E_SECONDS,
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
    ],
)
def test_each_way_in_is_in_each_histogram_of_the_model_that_was_asked(
    house: House, name: str
) -> None:
    assert house.value(f"{name}_count", model_name=ASKED) == len(EVERY_WAY)
    assert house.value(f"{name}_count", model_name=IDLE) == 0
    assert house.value(f"{name}_count") == len(EVERY_WAY)


def test_gaps_between_events_are_of_each_way_in(house: House) -> None:
    """The fake engine makes a token a step; steps that end during a commit make one event."""
    count = house.value(f"{names.INTER_TOKEN_SECONDS}_count", model_name=ASKED)
    assert len(EVERY_WAY) * NUM_MADE / 2 < count <= len(EVERY_WAY) * (NUM_MADE - 1)
    total_s = house.value(f"{names.INTER_TOKEN_SECONDS}_sum", model_name=ASKED)
    assert 0.01 * NUM_MADE / 2 * len(EVERY_WAY) < total_s < 60
    assert house.value(f"{names.INTER_TOKEN_SECONDS}_count", model_name=IDLE) == 0


@pytest.mark.parametrize(
    ("name", "each"), [("vllm:generation_tokens", NUM_MADE), ("vllm:prompt_tokens", NUM_PROMPT)]
)
def test_tokens_are_those_of_the_models_own_jobs(house: House, name: str, each: int) -> None:
    made = {alias: house.value(f"{name}_total", model_name=alias) for alias in ALIASES}
    assert made == {"first": 0, ASKED: each * len(EVERY_WAY), IDLE: 0}


def test_prompt_tokens_by_source_are_those_of_the_jobs(house: House) -> None:
    name = "vllm:prompt_tokens_by_source_total"
    assert house.value(name, model_name=ASKED) == NUM_PROMPT * len(EVERY_WAY) == house.value(name)


def test_success_is_counted_by_reason_for_each_way_in(house: House) -> None:
    name = f"{names.REQUEST_SUCCESS}_total"
    of_length = house.value(name, model_name=ASKED, finished_reason="length")
    assert of_length == len(EVERY_WAY) == house.value(name)


@pytest.mark.parametrize(
    "name",
    [
        names.KV_USAGE,
        names.REQUESTS_RUNNING,
        names.ENGINE_HEALTHY,
        "penstock:engine_steps_total",
        "penstock:kv_blocks",
        "vllm:prefix_cache_queries_total",
        "vllm:num_preemptions_total",
        "vllm:iteration_tokens_total_count",
        "penstock:commit_seconds_count",
        names.CACHE_CONFIG,
    ],
)
def test_a_figure_of_the_engine_is_there_once_under_its_first_name(house: House, name: str) -> None:
    assert len(house.samples(name)) == len(house.samples(name, model_name="first")) == 1


def test_the_sum_of_workers_alive_is_the_workers_and_each_lane_says_who_reads_it(
    house: House,
) -> None:
    assert house.value(names.WORKERS_ALIVE) == 1
    assert house.samples(names.WORKERS_ALIVE, model_name=IDLE) == []
    for alias in ALIASES:
        assert house.samples(names.LANE_WORKERS, model_name=alias) == [1, 1]


@pytest.mark.parametrize("look", [House.page, House.top], ids=["page", "top"])
def test_the_page_and_top_show_one_worker_and_what_each_model_made(
    house: House, look: Callable[[House], dict[str, Any]]
) -> None:
    seen = look(house)
    [worker] = seen["workers"]
    made = NUM_MADE * len(EVERY_WAY)
    assert worker["generation_tokens"] == made
    assert (worker["model"], worker["models"]) == ("first", sorted(ALIASES))
    tokens = {each["name"]: each["generation_tokens"] for each in seen["models"]}
    assert tokens == {"first": 0, ASKED: made, IDLE: 0}
    assert {each["num_workers"] for each in seen["models"]} == {1}


def test_the_pages_latencies_are_of_every_way_in(house: House) -> None:
    ttft = house.page()["latencies"]["ttft"]["counts"]
    assert (ttft[ASKED][-1], ttft[IDLE][-1]) == (len(EVERY_WAY), 0)


def test_a_beat_carries_the_figures_of_its_own_model_alone(house: House) -> None:
    sizes: dict[str, int] = {}
    for alias in ALIASES:
        plain = Plain(house.redis_url, alias).redis
        for lane in range(2):
            [key] = plain.keys(f"penstock:{{{alias}:{lane}}}:worker:*")
            text = plain.hget(key, "stats") or ""
            sizes[f"{alias}:{lane}"] = len(text)
            tokens = json.loads(text)["model"]["generation_tokens"]
            assert tokens == (NUM_MADE * len(EVERY_WAY) if alias == ASKED else 0)
    assert max(sizes.values()) < 4096, sizes

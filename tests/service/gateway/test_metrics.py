"""What one gateway publishes of a real worker: every histogram, and vLLM's own dashboard."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from api_keys import bearer, issue
from collector import Collector
from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.metrics import names
from penstock.worker.bundled.paths import BUNDLED_MODEL
from stage import GatewayProcess, eventually
from worker_process import WorkerProcess

MODEL = BUNDLED_MODEL.name
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACED = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0, text/plain;q=0.3"}
TEXT = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi " * 30}], "max_tokens": 40}
# The series that the dashboard of vLLM's example queries, each by the label model_name.
LATENCIES = ("e2e_request_latency", "inter_token_latency", "time_to_first_token")
HISTOGRAMS = (*names.JOB_HISTOGRAMS, *names.ENGINE_HISTOGRAMS)
DASHBOARD = {
    *(f"vllm:{name}_seconds_{part}" for name in LATENCIES for part in ("bucket", "sum", "count")),
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total",  # summed by finished_reason
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum",
}


class House:
    """A gateway with traces, a worker of the bundled model, and a key for no tenant."""

    def __init__(self, gateway: GatewayProcess, redis_url: str) -> None:
        self.url, self.redis_url = gateway.url, redis_url

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=headers, timeout=120)

    def families(self) -> dict[str, Metric]:
        text = httpx.get(self.url + "/metrics", timeout=60).text
        return {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, name: str, **labels: str) -> float:
        """The sum over the lines of a name that have these labels; 0 without any."""
        samples = [sample for family in self.families().values() for sample in family.samples]
        found = [each for each in samples if each.name == name]
        return sum(each.value for each in found if labels.items() <= each.labels.items())


@pytest.fixture(scope="module")
def house(server: Server) -> Iterator[House]:
    with (
        Collector() as collector,
        GatewayProcess(server.url, "--otlp-traces-endpoint", collector.url) as gateway,
        WorkerProcess(server.url, BUNDLED_MODEL) as worker,
    ):
        worker.ready()
        house = House(gateway, server.url)
        house.families()  # tokens of tenants count from the first look on
        assert house.post("/v1/completions", TEXT | {"n": 2}, **TRACED).status_code == 200
        asked = CHAT | {"response_format": {"type": "json_object"}, "stream": True}
        for _ in range(2):
            assert house.post("/v1/chat/completions", asked, **TRACED).status_code == 200
        eventually(lambda: house.value("vllm:request_params_n_count") == 3)
        yield house


def checked(families: list[Metric]) -> dict[str, int]:
    """How many series each histogram has. Bounds rise, counts never fall, +Inf is the count."""
    found = {}
    for family in (each for each in families if each.type == "histogram"):
        series: dict[tuple[tuple[str, str], ...], list[tuple[str, str, float]]] = {}
        for sample in family.samples:
            le = sample.labels.get("le", "")
            labels = {key: text for key, text in sample.labels.items() if key != "le"}
            place = series.setdefault(tuple(sorted(labels.items())), [])
            place.append((sample.name.removeprefix(family.name), le, sample.value))
        for lines in series.values():
            buckets = [(float(le), value) for part, le, value in lines if part == "_bucket"]
            assert buckets == sorted(buckets) and len(dict(buckets)) == len(buckets), family.name
            assert [value for _, value in buckets] == sorted(value for _, value in buckets)
            [count] = [value for part, _, value in lines if part == "_count"]
            assert buckets[-1] == (float("inf"), count), family.name
            assert [part for part, _, _ in lines].count("_sum") == 1
        found[family.name] = len(series)
    return found


@pytest.mark.slow
def test_all_that_vllms_dashboard_queries_is_published(house: House) -> None:
    lines: dict[str, list[Any]] = {}
    for family in house.families().values():
        for sample in family.samples:
            lines.setdefault(sample.name, []).append(sample)
    for name in DASHBOARD:
        of_the_model = [each for each in lines[name] if each.labels.get("model_name") == MODEL]
        assert of_the_model, name
        gauges = ("_running", "_waiting", "_perc")
        assert name.endswith(gauges) or any(each.value > 0 for each in of_the_model), name
    assert all("finished_reason" in each.labels for each in lines["vllm:request_success_total"])


def test_a_strict_reader_of_either_form_understands_it(house: House) -> None:
    classic = httpx.get(house.url + "/metrics", timeout=60)
    assert classic.headers["content-type"].startswith("text/plain; version=")
    asked = httpx.get(house.url + "/metrics", headers=OPENMETRICS, timeout=60)
    assert asked.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    histograms = {each.name for each in HISTOGRAMS}
    for families in (
        list(text_string_to_metric_families(classic.text)),
        list(openmetrics.text_string_to_metric_families(asked.text)),
    ):
        found = checked(families)
        assert found.keys() >= histograms
        assert {found[name] for name in histograms} == {1}  # one worker


def test_exemplars_lead_to_the_trace_where_openmetrics_is_asked_for(house: House) -> None:
    asked = httpx.get(house.url + "/metrics", headers=OPENMETRICS, timeout=60).text
    shown = re.findall(r'^(\S+?)_bucket.* # {trace_id="(\w+)"}', asked, re.MULTILINE)
    assert {trace for _, trace in shown} == {TRACE}
    expected = {names.TTFT_SECONDS, names.INTER_TOKEN_SECONDS, names.E2E_SECONDS}
    assert {name for name, _ in shown} == expected
    assert TRACE not in httpx.get(house.url + "/metrics", timeout=60).text


def test_histograms_tell_of_jobs_their_prompts_and_choices(house: House) -> None:
    count = {each.name: house.value(f"{each.name}_count", model_name=MODEL) for each in HISTOGRAMS}
    for name in ("queue_time", "prefill_time", "decode_time", "inference_time"):
        assert count[f"vllm:request_{name}_seconds"] == 3
    assert count["vllm:request_prompt_tokens"] == count["vllm:request_params_max_tokens"] == 3
    assert count["vllm:request_generation_tokens"] == count["vllm:request_num_preemptions"] == 4
    assert house.value("vllm:request_params_max_tokens_sum") == 12 + 2 * 40
    assert house.value("vllm:request_params_n_sum") == 2 + 1 + 1
    steps = house.value("penstock:engine_steps_total")
    assert count["vllm:iteration_tokens_total"] == steps > 0
    computed = house.value("penstock:computed_tokens_total")
    assert house.value("vllm:iteration_tokens_total_sum") == computed
    assert 0 < count["penstock:commit_seconds"] <= steps
    assert count["penstock:grammar_compile_seconds"] == 1
    assert house.value("penstock:grammar_cache_hits_total") == 1
    by_source = [
        house.value("vllm:prompt_tokens_by_source_total", source=source)
        for source in ("local_compute", "local_cache_hit")
    ]
    assert sum(by_source) == house.value("vllm:prompt_tokens_total") and min(by_source) > 0
    [info] = house.families()["vllm:cache_config_info"].samples
    blocks = house.value("penstock:kv_blocks")
    assert (info.labels["block_size"], info.labels["num_gpu_blocks"]) == ("16", f"{blocks:.0f}")
    assert (info.labels["enable_prefix_caching"], info.value) == ("True", 1)


def test_a_job_that_came_by_plain_redis_counts_and_so_do_its_tenants_tokens(house: House) -> None:
    before = house.value("vllm:request_prompt_tokens_count")

    async def ask() -> None:
        async with QueueClient.from_url(house.redis_url, tenant="acme") as client:
            await client.result(await client.enqueue("abc", model=MODEL, max_tokens=3))

    asyncio.run(ask())
    eventually(lambda: house.value("vllm:request_prompt_tokens_count") == before + 1)
    assert house.value("penstock:tenant_tokens_total", tenant="acme") >= 4
    tokens = [f"vllm:request_{kind}_tokens_sum" for kind in ("prompt", "generation")]
    of_all = house.value("penstock:tenant_tokens_total")
    assert of_all == sum(house.value(name) for name in tokens)


def test_refusals_are_counted_by_reason_and_never_by_what_the_caller_sent(house: House) -> None:
    def refused(model: str, reason: str) -> float:
        return house.value("vllm:admission_rejections_total", model_name=model, reason=reason)

    assert house.post("/v1/completions", TEXT | {"model": "nobody"}).status_code == 404
    assert refused("", "model_not_found") == 1
    headers = {"idempotency-key": "one"}
    assert house.post("/v1/completions", TEXT, **headers).status_code == 200
    assert house.post("/v1/completions", TEXT | {"max_tokens": 3}, **headers).status_code == 422
    assert refused(MODEL, "idempotency_mismatch") == 1
    assert "nobody" not in httpx.get(house.url + "/metrics", timeout=60).text


def test_a_reader_who_comes_back_is_counted_with_what_it_gets_from_the_log(house: House) -> None:
    job_id = house.post("/v1/jobs", TEXT).json()["id"]
    url = f"{house.url}/v1/jobs/{job_id}/events"
    assert '"done"' in httpx.get(url, timeout=60).text
    before = [house.value(f"{name}_total") for name in (names.RECONNECTS, names.REPLAYED_EVENTS)]
    events = httpx.get(url, params={"starting_after": "6"}, timeout=60).text.count("data: ")
    after = [house.value(f"{name}_total") for name in (names.RECONNECTS, names.REPLAYED_EVENTS)]
    assert events > 0 and after == [before[0] + 1, before[1] + events]


def test_a_tenants_key_sees_the_figures_of_no_other_tenant() -> None:
    with (
        Server() as server,
        GatewayProcess(server.url) as gateway,
        WorkerProcess(server.url, "fake") as worker,
    ):
        worker.ready()
        mine = issue(server.url, tenant="acme", scopes=("metrics", "inference"))
        theirs = issue(server.url, tenant="globex")
        operators = issue(server.url, tenant="ours", scopes=("admin",))

        def shown(key: str) -> str:
            answer = httpx.get(f"{gateway.url}/metrics", headers=bearer(key), timeout=60)
            return answer.text if answer.status_code == 200 else ""

        eventually(lambda: "penstock:tenant_tokens" in shown(operators))
        body = {"model": "fake", "prompt": "abc", "max_tokens": 3}
        for key in (mine, theirs):
            url = f"{gateway.url}/v1/completions"
            assert httpx.post(url, json=body, headers=bearer(key), timeout=60).status_code == 200
        eventually(lambda: all(f'tenant="{name}"' in shown(operators) for name in TENANTS))
        assert 'tenant="acme"' in shown(mine)
        assert "globex" not in shown(mine) and "ours" not in shown(mine)


TENANTS = ("acme", "globex")

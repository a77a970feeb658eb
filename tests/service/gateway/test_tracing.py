"""One trace leads from a request through the queue and its workers, and costs nothing when off."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider

from collector import Collector, SeenSpan
from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.worker.jobs.job_spans import attempt_id
from stage import GatewayProcess, eventually
from worker_process import WorkerProcess

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CANARY = "zebrafish"
NUM_SPANS = 9  # of a request that one worker answers


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced_gateway(server: Server, collector: Collector) -> Iterator[GatewayProcess]:
    with GatewayProcess(server.url, "--otlp-traces-endpoint", collector.url) as gateway:
        yield gateway


def worker(server: Server, collector: Collector) -> WorkerProcess:
    to = ["--otlp-traces-endpoint", collector.url, "--log-format", "json"]
    return WorkerProcess(server.url, "fake", *to)


def question(
    gateway: GatewayProcess, max_tokens: int, trace: str, flags: str = "01"
) -> dict[str, Any]:
    body = {"model": "fake", "prompt": CANARY, "max_tokens": max_tokens, "stream": True}
    return {
        "url": f"{gateway.url}/v1/completions",
        "json": body | {"ignore_eos": True},
        "headers": {"traceparent": f"00-{trace}-{CALLER}-{flags}"},
        "timeout": 120,
    }


def ask(gateway: GatewayProcess, max_tokens: int, trace: str = TRACE, flags: str = "01") -> str:
    return httpx.post(**question(gateway, max_tokens, trace, flags)).text


def epoch_of(span: SeenSpan) -> object:
    return span.attributes.get("penstock.epoch")


def one(spans: list[SeenSpan], name: str) -> SeenSpan:
    found = [span for span in spans if span.name == name]
    assert len(found) == 1, (name, [span.name for span in spans])
    return found[0]


def test_one_trace_from_the_request_to_the_last_token(
    server: Server, traced_gateway: GatewayProcess, collector: Collector
) -> None:
    with worker(server, collector).ready() as working:
        eventually(lambda: httpx.get(traced_gateway.url + "/health/ready").status_code == 200)
        assert "[DONE]" in ask(traced_gateway, 40)
        eventually(lambda: len(collector.of(TRACE)) == NUM_SPANS)
        records = [json.loads(line) for line in working.logged().splitlines()]
    spans = collector.of(TRACE)
    request, attempt = one(spans, "POST /v1/completions"), one(spans, "attempt fake")
    assert request.service == "penstock-gateway" and attempt.service == "penstock-worker"
    assert request.parent_id == CALLER and attempt.parent_id == request.span_id
    assert one(spans, "enqueue").parent_id == request.span_id
    queue = one(spans, "queue")
    assert queue.parent_id == request.span_id and queue.end_ns == attempt.start_ns
    inside = ["admission", "prefill", "commit of the first tokens", "decode", "commit of the end"]
    for name in inside:
        span = one(spans, name)
        assert span.parent_id == attempt.span_id
        assert attempt.start_ns <= span.start_ns <= span.end_ns <= attempt.end_ns
    assert one(spans, "admission").end_ns == one(spans, "prefill").start_ns
    assert one(spans, "prefill").end_ns == one(spans, "decode").start_ns
    assert request.events == ["first token"]
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["penstock.job.id"] == attempt.attributes["penstock.job.id"]
    assert attempt.attributes["gen_ai.usage.output_tokens"] == 40
    assert attempt.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attempt.attributes["penstock.outcome"] == "succeeded"
    [ended] = [record for record in records if record.get("trace_id") == TRACE]
    assert ended["job"] == request.attributes["penstock.job.id"] and ended["part"] == "io"
    assert " ended: succeeded, 40 tokens" in ended["message"]
    assert not any(CANARY.encode() in body for body in collector.bodies)


@pytest.mark.slow
def test_after_a_workers_death_the_next_attempt_links_to_the_first(
    server: Server, traced_gateway: GatewayProcess, collector: Collector
) -> None:
    trace = "b" * 32
    with worker(server, collector).ready() as first, worker(server, collector) as second:
        eventually(lambda: httpx.get(traced_gateway.url + "/health/ready").status_code == 200)
        with httpx.stream("POST", **question(traced_gateway, 3000, trace)) as answer:
            lines = answer.iter_lines()
            next(lines)
            second.ready()
            first.kill()
            assert "data: [DONE]" in list(lines)
        eventually(lambda: 2 in [epoch_of(span) for span in collector.of(trace)])
    attempts = {epoch_of(span): span for span in collector.of(trace) if epoch_of(span)}
    last = attempts[2]
    assert last.attributes["penstock.outcome"] == "succeeded"
    assert int(str(last.attributes["penstock.resumed_tokens"])) > 0
    known, dead = last.attributes["penstock.job.id"], attempts.get(1)
    assert last.links == [f"{attempt_id(str(known), 1):016x}"]
    assert dead is None or (dead.span_id, dead.attributes["penstock.outcome"]) == (
        last.links[0],
        "lost",
    )


def test_what_the_caller_does_not_sample_is_not_sent(
    server: Server, traced_gateway: GatewayProcess, collector: Collector
) -> None:
    with worker(server, collector).ready():
        eventually(lambda: httpx.get(traced_gateway.url + "/health/ready").status_code == 200)
        assert "[DONE]" in ask(traced_gateway, 5, "c" * 32, flags="00")
        assert "[DONE]" in ask(traced_gateway, 5, "d" * 32)
        eventually(lambda: len(collector.of("d" * 32)) == NUM_SPANS)
    assert not collector.of("c" * 32)


def test_the_sdk_goes_on_in_the_span_that_the_program_has_open(
    server: Server, collector: Collector
) -> None:
    tracer = TracerProvider().get_tracer("program")

    async def main() -> str:
        async with QueueClient.from_url(server.url) as client:
            with tracer.start_as_current_span("work") as span:
                await client.result(await client.enqueue(CANARY, model="fake", max_tokens=5))
            return f"{span.get_span_context().trace_id:032x}"

    with worker(server, collector).ready():
        trace = asyncio.run(main())
        eventually(lambda: len(collector.of(trace)) == NUM_SPANS - 2)


@pytest.mark.parametrize("module", ["penstock.gateway.server.app", "penstock.worker.jobs.service"])
def test_nothing_of_it_is_loaded_where_it_is_off(module: str) -> None:
    source = f"import sys, {module}; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0


def test_an_endpoint_that_is_none_is_refused_by_name() -> None:
    words = [sys.executable, "-m", "penstock.gateway.server.cli"]
    ended = subprocess.run(
        [*words, "--otlp-traces-endpoint", "localhost:4317"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2 and "otlp-traces-endpoint" in ended.stderr

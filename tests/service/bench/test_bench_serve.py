"""`penstock bench serve`: its keys are vLLM's, its counts right, and what fails is said."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.loadtest import bench
from penstock.loadtest.engines.own import OwnSettings
from penstock.loadtest.requests.dataset import write
from penstock.loadtest.requests.drive import drive
from penstock.loadtest.requests.http_stream import Target
from penstock.loadtest.requests.measurement import Measurement
from penstock.loadtest.requests.tokens import TokenErrors
from penstock.loadtest.requests.way import Way, arrivals_s
from penstock.loadtest.requests.workload import Request
from penstock.schemas.process.nearby import noted
from penstock.schemas.process.start import load_settings

FAKE = ["serve", "--model", "fake", "--load-format", "fake", "--fake-step-ms", "1"]
METRICS = ("ttft", "tpot", "itl", "e2el")
KEYS = {
    *("date", "backend", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "duration", "completed", "failed", "total_input_tokens"),
    *("total_output_tokens", "request_throughput", "output_throughput", "total_token_throughput"),
    *("machine", "dataset_name", "request_goodput", "goodput_slos_ms", "lost_tokens"),
    *("repeated_tokens", "foreign_tokens", "unproved_streams", "p99_send_delay_ms"),
    *("queue_depth", "cpu_used_by_others"),
    *(f"{which}_{metric}_ms" for metric in METRICS for which in ("mean", "median", "std", "p99")),
}
DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "errors"}
DETAILS |= {"sent_times", "job_ids", "trace_ids"}


def test_a_penstock_of_its_own_is_measured_and_one_that_fails_is_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, found = tmp_path / "asked.jsonl", tmp_path / "found.json"
    write(asked, [*(Request([50 + n] * 9, 12) for n in range(6)), Request([50] * 60, 12)])
    words = [*FAKE, "--max-model-len", "40", "--dataset-name", "custom", "--ignore-eos"]
    words += ["--dataset-path", str(asked), "--max-concurrency", "3", "--request-rate", "200"]
    words += ["--save-result", "--save-detailed", "--result-dir", str(tmp_path)]
    assert bench.main([*words, "--result-filename", found.name]) == 0
    result = json.loads(found.read_text())
    assert set(result) == KEYS | DETAILS
    assert (result["completed"], result["failed"], result["num_prompts"]) == (6, 1, 7)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (6 * 9, 6 * 12)
    assert result["output_throughput"] == pytest.approx(72 / result["duration"])
    assert all(len(result[key]) == 7 for key in DETAILS)
    said = capsys.readouterr()
    assert "1 failed: status 400: prompt: 60 tokens" in said.err
    assert result["errors"][:6] == [""] * 6


OPENS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CHUNKED = OPENS[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"
PIECE = b'data: {"choices":[{"text":"a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"it broke"}}\n\n'
ANSWERS: Mapping[str, tuple[bytes, str]] = {
    "whole": (OPENS + PIECE * 3 + USAGE + DONE, ""),
    "without usage": (OPENS + PIECE * 3 + DONE, ""),
    "cut": (OPENS + PIECE, "ended before"),
    "ended early": (CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(PIECE), PIECE), "[DONE]"),
    "refused": (
        b'HTTP/1.1 503 No\r\nContent-Length: 26\r\n\r\n{"error":{"message":"full"}',
        "full",
    ),
    "broken in the middle": (OPENS + PIECE + ERROR + DONE, "it broke"),
    "no stream": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "status 200: {}"),
    "no JSON": (OPENS + b"data: {\n\n" + DONE, "cannot be read"),
    "no HTTP": (b"hello\r\n\r\n", "cannot be read"),
    "silent": (b"", "ended before"),
}


@contextmanager
def answering(answer: bytes, num_bytes: int) -> Iterator[Target]:
    """A server with one answer for all, sent in pieces of so many bytes."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    port = 0

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for start in range(0, len(answer), num_bytes):
            writer.write(answer[start : start + num_bytes])
            await asyncio.sleep(0)
        writer.close()

    async def serve() -> None:
        nonlocal port
        server = await asyncio.start_server(reply, "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        ready.set()

    loop.create_task(serve())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    ready.wait()
    try:
        yield Target(f"http://127.0.0.1:{port}/v1")
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize("num_bytes", [5, 1000])
@pytest.mark.parametrize("name", ANSWERS)
def test_each_way_to_fail_has_its_words_and_costs_no_other_request(
    name: str, num_bytes: int
) -> None:
    answer, words = ANSWERS[name]
    with answering(answer, num_bytes) as server:
        found = asyncio.run(drive(server, "x", [Request("Hello", 5)] * 2, Way()))
    assert [words in error for error in found.errors] == ([True, True] if words else [])
    lost = 4 if name in ("cut", "ended early", "broken in the middle") else 0  # one piece came
    assert found.token_errors == TokenErrors(num_lost=2 * lost)
    if not words:
        counted = 5 if name == "whole" else 3
        assert [len(one.tokens_s) for one in found.completed] == [3, 3]
        assert [one.num_tokens for one in found.completed] == [counted, counted]


def test_its_own_server_is_not_that_of_a_running_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with noted("redis://127.0.0.1:1/0"):
        given = load_settings(OwnSettings, "penstock bench", ["--max-num-seqs", "3"]).given()
    assert given == {"max_num_seqs": 3}
    assert capsys.readouterr().err == ""


def test_nobody_there_is_a_failed_request() -> None:
    found = asyncio.run(drive(Target("http://127.0.0.1:9"), "x", [Request("Hello", 5)], Way()))
    assert "Connection refused" in found.errors[0]


def test_arrivals_keep_the_rate_that_was_asked_and_bursts_lie_closer() -> None:
    even = arrivals_s(500, Way(request_rate=20, burstiness=100))
    burst = arrivals_s(500, Way(request_rate=20, burstiness=0.1))
    assert even[-1] == pytest.approx(499 / 20) and burst[-1] == pytest.approx(499 / 20)
    gaps = [sorted(b - a for a, b in pairwise(due)) for due in (even, burst)]
    assert gaps[0][250] == pytest.approx(1 / 20, rel=0.1)
    assert gaps[1][250] < 1 / 200
    assert arrivals_s(3, Way()) == [0, 0, 0]


def test_what_failed_counts_in_no_figure() -> None:
    with answering(ANSWERS["broken in the middle"][0], 1000) as server:
        found = asyncio.run(drive(server, "x", [Request("Hello", 5)], Way()))
    assert (found.num_tokens, found.latencies_ms("ttft"), found.latencies_ms("itl")) == (0, [], [])
    assert Measurement(found.timelines, 1.0).summary(["e2el"], [50])["p50_e2el_ms"] == 0


@pytest.mark.parametrize(
    "words, said",
    [
        (["--base-url", "ftp://x"], "--base-url"),
        (["--base-url", "redis://x"], "base_url: --backend openai takes"),
        (["--backend", "penstock-sdk", "--base-url", "http://x"], "takes a redis:// URL"),
        (["--ramp-up-strategy", "linear"], "ramp_up_start_rps"),
        (["--goodput", "ttft:200 tps:3"], "'tps:3'"),
        (["--goodput", "ttft"], "'ttft'"),
        (["--report", "x.pdf"], ".html"),
        (["--base-url", "http://127.0.0.1:9"], "http://127.0.0.1:9/v1/models: "),
        (["--endpoint", "/v2"], "--endpoint"),
        (["--request-rate", "0"], "--request-rate"),
        (["--percentile-metrics", "ttft,x"], "--percentile-metrics"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--model", "nowhere"], "nowhere"),
    ],
    ids=str,
)
def test_a_bad_option_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    try:
        status = bench.main(["serve", *words])
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        status = ended.code
    assert status in (1, 2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("penstock bench serve: ") and said in line


def test_a_server_of_no_model_yet_is_told_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    answer = b'HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{"data": []}'
    with answering(answer, 1000) as server:
        assert bench.main(["serve", "--base-url", f"http://127.0.0.1:{server.port}"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith("/v1/models lists no model; none is served yet")

"""The figures of one run against a server, by vLLM's names, and how they are shown."""

from collections import Counter
from collections.abc import Iterator, Mapping

from penstock.loadtest.machine.usage import description
from penstock.loadtest.requests.measurement import Measurement, Metric
from penstock.loadtest.requests.way import Way

HEADERS: dict[Metric, tuple[str, str]] = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
_LATE_MS = 10.0  # a client that sends later than this is itself part of the latency


def result(found: Measurement, slos_ms: Mapping[Metric, float]) -> dict[str, object]:
    num_tokens, wrong = found.num_prompt_tokens + found.num_tokens, found.token_errors
    return {
        "machine": description(),
        "duration": found.wall_s,
        "completed": len(found.completed),
        "failed": len(found.errors),
        "total_input_tokens": found.num_prompt_tokens,
        "total_output_tokens": found.num_tokens,
        "request_throughput": len(found.completed) / found.wall_s,
        "request_goodput": found.goodput(slos_ms) if slos_ms else None,
        "goodput_slos_ms": {**slos_ms},
        "output_throughput": found.tokens_per_s,
        "total_token_throughput": num_tokens / found.wall_s,
        "lost_tokens": wrong.lost,
        "repeated_tokens": wrong.repeated,
        "foreign_tokens": wrong.foreign,
        "unproved_streams": wrong.unproved,
        "p99_send_delay_ms": found.late_ms(99),
        "queue_depth": [
            [depth.at_s - found.begin_s, depth.num_waiting, depth.num_running]
            for depth in found.depths
        ],
    }


def detailed(found: Measurement) -> dict[str, object]:
    """Return each request's times in seconds; of one that failed, those that it had.

    `start_times` are when requests were due, `sent_times` when the client sent them.
    """
    each = found.timelines
    return {
        "input_lens": [one.num_prompt for one in each],
        "output_lens": [one.num_tokens for one in each],
        "ttfts": [one.ttft_ms / 1e3 if one.tokens_s else 0.0 for one in each],
        "itls": [[gap / 1e3 for gap in one.gaps_ms] for one in each],
        "latencies": [(one.end_s or one.begin_s) - one.begin_s for one in each],
        "start_times": [one.begin_s for one in each],
        "sent_times": [one.begin_s + one.late_ms / 1e3 for one in each],
        "job_ids": [one.job_id for one in each],
        "trace_ids": [one.trace_id for one in each],
        "errors": [one.error for one in each],
    }


def show(
    summary: Mapping[str, object],
    latencies: Mapping[str, float],
    found: Measurement,
    way: Way,
) -> None:
    rate = way.request_rate
    lines = {
        "Successful requests:": summary["completed"],
        "Failed requests:": summary["failed"],
        "Maximum request concurrency:": way.max_concurrency or "none",
        "Request rate configured (RPS):": rate if way.ramp is None else _ramp(way),
        "Benchmark duration (s):": summary["duration"],
        "Total input tokens:": summary["total_input_tokens"],
        "Total generated tokens:": summary["total_output_tokens"],
        "Request throughput (req/s):": summary["request_throughput"],
        "Request goodput (req/s):": summary["request_goodput"],
        "Output token throughput (tok/s):": summary["output_throughput"],
        "Total token throughput (tok/s):": summary["total_token_throughput"],
    }
    if summary["request_goodput"] is None:
        del lines["Request goodput (req/s):"]
    print(f"{' Serving Benchmark Result ':=^50}")
    for name, value in lines.items():
        print(f"{name:<40} {value:.2f}" if isinstance(value, float) else f"{name:<40} {value}")
    for metric, (header, short) in HEADERS.items():
        keys = [key for key in latencies if key.endswith(f"_{metric}_ms")]
        if keys:
            print(f"{header:-^50}")
        for key in keys:
            which = key.removesuffix(f"_{metric}_ms")
            print(f"{f'{which.capitalize()} {short} (ms):':<40} {latencies[key]:.2f}")
    print("=" * 50)
    print(f"{'Wrong tokens:':<40} {found.token_errors}")
    if any(timeline.num_counted is None for timeline in found.completed):
        print("The server sent no usage: what is counted are pieces of its streams, not tokens")
    if found.late_ms(99) > _LATE_MS:
        print(f"{'Sent after their time, p99 (ms):':<40} {found.late_ms(99):.0f}")
    cpu_us = found.cpu_s / max(1, found.num_tokens) * 1e6
    print(f"{'CPU of this client (us/token):':<40} {cpu_us:.0f}")


def _ramp(way: Way) -> str:
    assert way.ramp is not None
    return f"{way.ramp.strategy} from {way.ramp.start_rps:g} to {way.ramp.end_rps:g}"


def told_errors(found: Measurement) -> Iterator[str]:
    """Yield a line for each kind of failure, and for each stream whose tokens are wrong."""
    for error, count in Counter(found.errors).most_common():
        yield f"{count} failed: {error}"
    for one in found.timelines:
        wrong = one.token_errors
        if wrong.unproved:
            yield f"{one.job_id}: its log cannot be read, so nothing is known of its tokens"
        elif wrong:
            yield f"{one.job_id or 'a request'}: wrong tokens: {wrong}"

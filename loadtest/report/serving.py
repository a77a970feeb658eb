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


def result(measurement: Measurement, slos_ms: Mapping[Metric, float]) -> dict[str, object]:
    num_tokens, wrong = (
        measurement.num_prompt_tokens + measurement.num_tokens,
        measurement.token_errors,
    )
    return {
        "machine": description(),
        "duration": measurement.wall_s,
        "completed": len(measurement.completed),
        "failed": len(measurement.errors),
        "total_input_tokens": measurement.num_prompt_tokens,
        "total_output_tokens": measurement.num_tokens,
        "request_throughput": len(measurement.completed) / measurement.wall_s,
        "request_goodput": measurement.goodput(slos_ms) if slos_ms else None,
        "goodput_slos_ms": {**slos_ms},
        "output_throughput": measurement.tokens_per_s,
        "total_token_throughput": num_tokens / measurement.wall_s,
        "lost_tokens": wrong.num_lost,
        "repeated_tokens": wrong.num_repeated,
        "foreign_tokens": wrong.num_foreign,
        "unproved_streams": wrong.num_unproved,
        "p99_send_delay_ms": measurement.late_ms(99),
        "queue_depth": [
            [depth.at_s - measurement.begin_s, depth.num_waiting, depth.num_running]
            for depth in measurement.depths
        ],
    }


def detailed(measurement: Measurement) -> dict[str, object]:
    """Return each request's times in seconds; of one that failed, those that it had.

    `start_times` are when requests were due, `sent_times` when the client sent them.
    """
    timelines = measurement.timelines
    return {
        "input_lens": [timeline.num_prompt for timeline in timelines],
        "output_lens": [timeline.num_tokens for timeline in timelines],
        "ttfts": [timeline.ttft_ms / 1e3 if timeline.tokens_s else 0.0 for timeline in timelines],
        "itls": [[gap / 1e3 for gap in timeline.gaps_ms] for timeline in timelines],
        "latencies": [
            (timeline.end_s or timeline.begin_s) - timeline.begin_s for timeline in timelines
        ],
        "start_times": [timeline.begin_s for timeline in timelines],
        "sent_times": [timeline.begin_s + timeline.late_ms / 1e3 for timeline in timelines],
        "job_ids": [timeline.job_id for timeline in timelines],
        "trace_ids": [timeline.trace_id for timeline in timelines],
        "errors": [timeline.error for timeline in timelines],
    }


def show(
    summary: Mapping[str, object],
    latencies: Mapping[str, float],
    measurement: Measurement,
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
            statistic = key.removesuffix(f"_{metric}_ms")
            print(f"{f'{statistic.capitalize()} {short} (ms):':<40} {latencies[key]:.2f}")
    print("=" * 50)
    print(f"{'Wrong tokens:':<40} {measurement.token_errors}")
    if any(timeline.num_counted is None for timeline in measurement.completed):
        print("The server sent no usage: what is counted are pieces of its streams, not tokens")
    if measurement.late_ms(99) > _LATE_MS:
        print(f"{'Sent after their time, p99 (ms):':<40} {measurement.late_ms(99):.0f}")
    cpu_us = measurement.cpu_s / max(1, measurement.num_tokens) * 1e6
    print(f"{'CPU of this client (us/token):':<40} {cpu_us:.0f}")


def _ramp(way: Way) -> str:
    assert way.ramp is not None
    return f"{way.ramp.strategy} from {way.ramp.start_rps:g} to {way.ramp.end_rps:g}"


def told_errors(measurement: Measurement) -> Iterator[str]:
    """Yield a line for each kind of failure, and for each stream whose tokens are wrong."""
    for error, count in Counter(measurement.errors).most_common():
        yield f"{count} failed: {error}"
    for timeline in measurement.timelines:
        wrong = timeline.token_errors
        if wrong.num_unproved:
            yield f"{timeline.job_id}: its log cannot be read, so nothing is known of its tokens"
        elif wrong:
            yield f"{timeline.job_id or 'a request'}: wrong tokens: {wrong}"

"""`penstock bench serve`: latencies and throughput of an OpenAI-compatible server.

Options and result keys are those of `vllm bench serve`.
"""

import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, get_args

import uvloop
from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

from penstock.loadtest.engines.own import OwnSettings, flags
from penstock.loadtest.engines.system import serving
from penstock.loadtest.machine.usage import Neighbours
from penstock.loadtest.requests.dataset import DatasetSettings
from penstock.loadtest.requests.drive import Endpoint, Way, drive, warm_up
from penstock.loadtest.requests.http_stream import Target, first_model, target
from penstock.loadtest.requests.measurement import Measurement, Metric
from penstock.loadtest.requests.workload import NUM_IDS
from penstock.schemas.process.start import load_settings, words_of

PROGRAM = "penstock bench serve"
HEADERS: dict[Metric, tuple[str, str]] = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}


class BenchServeSettings(OwnSettings, DatasetSettings):
    """Latencies and throughput of a server, seen by its clients.

    Without --base-url a whole Penstock is started for it, and each setting of a worker is one of
    its own. The environment's OPENAI_API_KEY is sent to a server that is given.
    """

    base_url: str | None = Field(
        None, description="of a server that runs, http://host:port; none: one is started"
    )
    endpoint: Endpoint = Field(
        "/v1/completions", description="for a chat, ids are written as words"
    )
    vocab_size: int = Field(
        NUM_IDS, ge=11, description="with --base-url: the ids of prompts are below this"
    )
    request_rate: float = Field(
        float("inf"), gt=0, description="requests a second; inf: all at the beginning"
    )
    burstiness: float = Field(
        1.0, gt=0, description="of arrivals; 1: a Poisson process, less: more in bursts"
    )
    max_concurrency: int | None = Field(None, ge=1, description="requests at once, at most")
    ignore_eos: bool = Field(
        False, description="go on to the last token; so it is but for --dataset-name custom"
    )
    temperature: float = Field(0.0, ge=0, le=2, description="0: greedily")
    percentile_metrics: Annotated[list[Metric], NoDecode, BeforeValidator(words_of)] = Field(
        default_factory=lambda: list(get_args(Metric)), description="ttft,tpot,itl,e2el"
    )
    metric_percentiles: Annotated[
        list[Annotated[float, Field(ge=0, le=100)]], NoDecode, BeforeValidator(words_of)
    ] = Field(default_factory=lambda: [99.0], description="separated by commas")
    save_result: bool = Field(False, description="write the result to a file")
    save_detailed: bool = Field(False, description="with what was measured of each request")
    result_dir: Path = Field(Path(), description="where the file goes")
    result_filename: str | None = Field(None, description="none: made of rate, model and date")

    def way(self) -> Way:
        return Way(
            self.endpoint,
            self.request_rate,
            self.burstiness,
            self.max_concurrency,
            self.ignore_eos or self.dataset_name != "custom",
            self.temperature,
            self.seed,
        )


def main(argv: Sequence[str]) -> int:
    settings = load_settings(BenchServeSettings, PROGRAM, argv)
    given = target(settings.base_url) if settings.base_url is not None else None
    vocab_size = settings.vocab_size if given else settings.own_vocab_size
    requests = settings.requests(vocab_size)

    async def measure() -> tuple[str, Measurement]:
        async with _server(settings, given) as server:
            named = given is not None and "model" in settings.model_fields_set
            model = settings.model if named else first_model(server)
            await warm_up(server, model, requests, settings.way())
            return model, await drive(server, model, requests, settings.way())

    with Neighbours() as neighbours:
        model, found = uvloop.run(measure())
    latencies = found.summary(settings.percentile_metrics, settings.metric_percentiles)
    _show(settings, found, latencies)
    if given is None:
        print(f"{'CPU used by others:':<40} {neighbours.share:.0%}")
    if settings.save_result:
        _save(settings, model, result(found) | latencies, found)
    return 0 if found.completed else 1


@asynccontextmanager
async def _server(settings: BenchServeSettings, given: Target | None) -> AsyncIterator[Target]:
    if given is not None:
        yield given
        return
    async with serving(settings.model, *flags(settings.given())) as (url, _):
        yield Target(url)


def result(found: Measurement) -> dict[str, object]:
    num_tokens = found.num_prompt_tokens + found.num_tokens
    return {
        "duration": found.wall_s,
        "completed": len(found.completed),
        "failed": len(found.errors),
        "total_input_tokens": found.num_prompt_tokens,
        "total_output_tokens": found.num_tokens,
        "request_throughput": len(found.completed) / found.wall_s,
        "output_throughput": found.tokens_per_s,
        "total_token_throughput": num_tokens / found.wall_s,
    }


def _show(settings: BenchServeSettings, found: Measurement, latencies: dict[str, float]) -> None:
    summary = result(found)
    lines = {
        "Successful requests:": summary["completed"],
        "Failed requests:": summary["failed"],
        "Maximum request concurrency:": settings.max_concurrency or "none",
        "Request rate configured (RPS):": settings.request_rate,
        "Benchmark duration (s):": summary["duration"],
        "Total input tokens:": summary["total_input_tokens"],
        "Total generated tokens:": summary["total_output_tokens"],
        "Request throughput (req/s):": summary["request_throughput"],
        "Output token throughput (tok/s):": summary["output_throughput"],
        "Total token throughput (tok/s):": summary["total_token_throughput"],
    }
    print(f"{' Serving Benchmark Result ':=^50}")
    for name, value in lines.items():
        print(f"{name:<40} {value:.2f}" if isinstance(value, float) else f"{name:<40} {value}")
    for metric in settings.percentile_metrics:
        header, short = HEADERS[metric]
        print(f"{header:-^50}")
        for key, value in latencies.items():
            which, _, of = key.removesuffix("_ms").rpartition("_")
            if of == metric:
                print(f"{f'{which.capitalize()} {short} (ms):':<40} {value:.2f}")
    print("=" * 50)
    if any(timeline.num_counted is None for timeline in found.completed):
        print("The server sent no usage: what is counted are pieces of its streams, not tokens")
    print(
        f"{'CPU of this client (us/token):':<40} {found.cpu_s / max(1, found.num_tokens) * 1e6:.0f}"
    )
    for error, count in Counter(found.errors).most_common():
        print(f"{count} failed: {error}", file=sys.stderr)


def _save(
    settings: BenchServeSettings, model: str, found: dict[str, object], measured: Measurement
) -> None:
    now, rate = datetime.now(UTC).strftime("%Y%m%d-%H%M%S"), f"{settings.request_rate:g}"
    saved: dict[str, object] = {
        "date": now,
        "backend": "openai",
        "model_id": model,
        "tokenizer_id": None,
        "num_prompts": len(measured.timelines),
        "request_rate": "inf" if rate == "inf" else settings.request_rate,
        "burstiness": settings.burstiness,
        "max_concurrency": settings.max_concurrency,
        **found,
    }
    if settings.save_detailed:
        saved |= _detailed(measured)
    name = settings.result_filename or f"openai-{rate}qps-{Path(model).name}-{now}.json"
    (settings.result_dir / name).write_text(json.dumps(saved) + "\n")


def _detailed(measured: Measurement) -> dict[str, object]:
    """Return each request's times in seconds; of one that failed, those that it had."""
    each = measured.timelines
    return {
        "input_lens": [one.num_prompt for one in each],
        "output_lens": [one.num_tokens for one in each],
        "ttfts": [one.ttft_ms / 1e3 if one.tokens_s else 0.0 for one in each],
        "itls": [[gap / 1e3 for gap in one.gaps_ms] for one in each],
        "latencies": [(one.end_s or one.begin_s) - one.begin_s for one in each],
        "start_times": [one.begin_s for one in each],
        "errors": [one.error for one in each],
    }

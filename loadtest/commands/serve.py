"""`penstock bench serve`: latencies and throughput of an OpenAI-compatible server, or of a queue.

Options and result keys are those of `vllm bench serve`.
"""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, Self, get_args
from urllib.parse import urlsplit

import uvloop
from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode

from penstock.gateway.queue_client import QueueClient
from penstock.loadtest.engines.own import OwnSettings, flags
from penstock.loadtest.engines.system import serving, system
from penstock.loadtest.errors import BadOption
from penstock.loadtest.machine.usage import Neighbours
from penstock.loadtest.report.page import write_report
from penstock.loadtest.report.result_file import ResultFile
from penstock.loadtest.report.serving import detailed, result, show, told_errors
from penstock.loadtest.requests.dataset import DatasetSettings
from penstock.loadtest.requests.drive import LoadedServer, drive, warm_up
from penstock.loadtest.requests.goals import Slos
from penstock.loadtest.requests.http_stream import Target, target
from penstock.loadtest.requests.measurement import Measurement, Metric
from penstock.loadtest.requests.queue_stream import QueueTarget
from penstock.loadtest.requests.way import Endpoint, Ramp, RampStrategy, Way
from penstock.schemas.process.start import load_settings, words_of

PROGRAM = "penstock bench serve"
Backend = Literal["openai", "openai-chat", "penstock-sdk"]
REDIS = ("redis", "rediss", "unix")


class BenchServeSettings(OwnSettings, DatasetSettings):
    """Latencies and throughput of a server, seen by its clients.

    Without --base-url a whole Penstock is started for it, and each setting of a worker is one of
    its own. The environment's OPENAI_API_KEY is sent to a server that is given. The status is 1
    where a token was lost, repeated or foreign.
    """

    backend: Backend = Field(
        "openai",
        description="openai: completions; openai-chat: chats, ids written as words; penstock-sdk: "
        "straight over Redis, without HTTP",
    )
    base_url: str | None = Field(
        None,
        description="of a server that runs, http://host:port, for penstock-sdk redis://host:port; "
        "none: one is started",
    )
    endpoint: Endpoint | None = Field(None, description="none: the backend's")
    vocab_size: int = Field(
        4096, ge=11, description="with --base-url: the ids of prompts are below this"
    )
    request_rate: float = Field(
        float("inf"), gt=0, description="requests a second; inf: all at the beginning"
    )
    burstiness: float = Field(
        1.0, gt=0, description="of arrivals; 1: a Poisson process, less: more in bursts"
    )
    ramp_up_strategy: RampStrategy | None = Field(
        None, description="a rate that changes from the first request to the last"
    )
    ramp_up_start_rps: float | None = Field(None, gt=0, description="requests a second at first")
    ramp_up_end_rps: float | None = Field(None, gt=0, description="requests a second at last")
    max_concurrency: int | None = Field(
        None, ge=1, description="requests at once, at most; without a rate: so many clients"
    )
    ignore_eos: bool = Field(
        False, description="go on to the last token; so it is but for --dataset-name custom"
    )
    temperature: float = Field(0.0, ge=0, le=2, description="0: greedily")
    goodput: Slos = Field(
        default_factory=dict,
        description="milliseconds that a good request keeps, as 'ttft:200 tpot:50 e2el:2000'",
    )
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
    report: Path | None = Field(None, description="write a page of the result, one .html file")

    @model_validator(mode="after")
    def ramps_wholly(self) -> Self:
        ramp = [self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps]
        if any(value is not None for value in ramp):
            if None in ramp:
                raise ValueError(
                    "ramp_up_strategy, ramp_up_start_rps and ramp_up_end_rps: give all of them"
                )
            if self.request_rate < float("inf"):
                raise ValueError("request_rate: the ramp has its own rates; leave one of them out")
        return self

    @model_validator(mode="after")
    def asks_a_backend_where_it_is(self) -> Self:
        is_redis = urlsplit(self.base_url or "").scheme in REDIS
        if self.base_url is not None and is_redis != (self.backend == "penstock-sdk"):
            scheme = "redis://" if self.backend == "penstock-sdk" else "http:// or https://"
            raise ValueError(f"base_url: --backend {self.backend} takes a {scheme} URL")
        return self

    def way(self) -> Way:
        ramp = None
        if self.ramp_up_strategy and self.ramp_up_start_rps and self.ramp_up_end_rps:
            ramp = Ramp(self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        own: Endpoint = (
            "/v1/chat/completions" if self.backend == "openai-chat" else "/v1/completions"
        )
        return Way(
            self.endpoint or own,
            self.request_rate,
            self.burstiness,
            self.max_concurrency,
            self.ignore_eos or self.dataset_name != "custom",
            self.temperature,
            self.seed,
            ramp,
        )


def main(argv: Sequence[str]) -> int:
    settings = load_settings(BenchServeSettings, PROGRAM, argv)
    if settings.report is not None and settings.report.suffix != ".html":
        raise BadOption(f"--report: {settings.report}: the name ends with .html")
    is_own = settings.base_url is None
    requests = settings.requests(settings.own_vocab_size if is_own else settings.vocab_size)

    async def measure() -> tuple[str, Measurement]:
        async with _server(settings) as server:
            is_named = not is_own and "model" in settings.model_fields_set
            model = settings.model if is_named else await server.first_model()
            await warm_up(server, model, requests, settings.way())
            return model, await drive(server, model, requests, settings.way())

    with Neighbours() as neighbours:
        model, measurement = uvloop.run(measure())
    latencies = measurement.summary(settings.percentile_metrics, settings.metric_percentiles)
    summary = result(measurement, settings.goodput)
    show(summary, latencies, measurement, settings.way())
    if is_own:
        print(f"{'CPU used by others:':<40} {neighbours.share:.0%}")
    for line in told_errors(measurement):
        print(line, file=sys.stderr)
    whole = _asked(settings, model, len(requests)) | summary | latencies
    if is_own:
        whole["cpu_used_by_others"] = neighbours.share
    if settings.save_result:
        _save(
            settings,
            model,
            ResultFile(whole | (detailed(measurement) if settings.save_detailed else {})),
        )
    if settings.report is not None:
        write_report(
            settings.report, [ResultFile(whole | detailed(measurement), settings.report.stem)]
        )
    return 0 if measurement.completed and not measurement.token_errors else 1


@asynccontextmanager
async def _server(settings: BenchServeSettings) -> AsyncIterator[LoadedServer]:
    is_queue, url = settings.backend == "penstock-sdk", settings.base_url
    if url is not None and is_queue:
        async with QueueClient.from_url(url) as client:
            yield QueueTarget(client, url)
    elif url is not None:
        yield target(url)
    elif is_queue:
        async with system("--model", settings.model, *flags(settings.given())) as whole:
            yield QueueTarget(whole.client, whole.server.url)
    else:
        async with serving(settings.model, *flags(settings.given())) as (url, _):
            yield Target(url)


def _asked(settings: BenchServeSettings, model: str, num_prompts: int) -> dict[str, object]:
    """Return what was asked, which two results must share to be compared."""
    now, rate = datetime.now(UTC).strftime("%Y%m%d-%H%M%S"), settings.request_rate
    names = ("strategy", "start_rps", "end_rps") if settings.ramp_up_strategy else ()
    ramp = {f"ramp_up_{name}": getattr(settings, f"ramp_up_{name}") for name in names}
    return {
        "date": now,
        "backend": settings.backend,
        "model_id": model,
        "tokenizer_id": None,
        "dataset_name": settings.dataset_name,
        "num_prompts": num_prompts,
        "request_rate": "inf" if rate == float("inf") else rate,
        "burstiness": settings.burstiness,
        "max_concurrency": settings.max_concurrency,
        **ramp,
    }


def _save(settings: BenchServeSettings, model: str, file: ResultFile) -> None:
    rate = f"{settings.request_rate:g}"
    name = f"{settings.backend}-{rate}qps-{Path(model).name}-{file.raw['date']}.json"
    file.write(settings.result_dir / (settings.result_filename or name))

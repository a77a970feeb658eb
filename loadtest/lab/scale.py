"""`penstock bench scale`: many streams at once, and a queue in which many jobs wait."""

import asyncio
import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import uvloop
from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode
from rich.console import Console
from rich.table import Table

from penstock.loadtest.engines.own import OwnSettings, flags
from penstock.loadtest.engines.system import serving
from penstock.loadtest.lab.engines.waiting_jobs import PROMPT, AtDepth, CallCost, costs_at
from penstock.loadtest.machine.usage import Neighbours, description, listener, memory_bytes
from penstock.loadtest.report.serving import told_errors
from penstock.loadtest.requests.drive import drive, warm_up
from penstock.loadtest.requests.http_stream import Target
from penstock.loadtest.requests.measurement import Measurement
from penstock.loadtest.requests.way import Way
from penstock.loadtest.requests.workload import random_requests
from penstock.schemas.process.start import load_settings, words_of

PROGRAM = "penstock bench scale"
PROMPT_TOKENS = 16
_SPARE_FILES = 200  # beside a connection for each stream


class ScaleSettings(OwnSettings):
    """Many streams at once, of which no token may be lost, and the cost of each call of the queue
    with few and with many jobs waiting. The status is 1 where a stream failed or lost a token.
    """

    only: Literal["streams", "queue", ""] = Field("", description="measure this alone")
    num_streams: int = Field(1000, ge=1, description="requests over HTTP, all at once")
    num_tokens: int = Field(64, ge=1, description="of each stream")
    depths: Annotated[list[Annotated[int, Field(ge=1)]], NoDecode, BeforeValidator(words_of)] = (
        Field(default_factory=lambda: [100, 10_000, 100_000], description="jobs that wait")
    )
    num_tenants: int = Field(1000, ge=1, description="whose jobs these are, in turn")
    output_json: Path | None = Field(None, description="write the figures there too")


def main(argv: Sequence[str]) -> int:
    settings = load_settings(ScaleSettings, PROGRAM, argv)
    console = Console()
    if not console.is_terminal:
        console.width = 110
    result: dict[str, object] = {"machine": description()}
    is_whole = True
    if settings.only != "queue":
        with Neighbours() as neighbours:
            measurement, num_bytes = uvloop.run(_streams(settings))
        result["streams"] = _show_streams(
            console, settings, measurement, num_bytes, neighbours.share
        )
        is_whole = not (measurement.errors or measurement.token_errors)
    if settings.only != "streams":
        with Neighbours() as neighbours:
            depths = asyncio.run(costs_at(settings.depths, settings.num_tenants))
        result["queue"] = _show_depths(console, settings, depths)
        console.print(f"CPU used by others: {neighbours.share:.0%}", highlight=False)
    if settings.output_json is not None:
        settings.output_json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if is_whole else 1


async def _streams(settings: ScaleSettings) -> tuple[Measurement, int]:
    """Return what was seen of the streams, and what the gateway's memory grew by under them."""
    _allow_files(settings.num_streams + _SPARE_FILES)
    own = {"max_num_seqs": settings.num_streams} | settings.given()
    vocab_size = settings.own_vocab_size
    requests = random_requests(settings.num_streams, PROMPT_TOKENS, settings.num_tokens, vocab_size)
    async with serving(settings.model, *flags(own)) as (url, _):
        server = Target(url)
        model = await server.first_model()
        await warm_up(server, model, requests, Way())
        gateway = listener(int(url.rpartition(":")[2])) or 0
        before = memory_bytes(gateway, "VmRSS")
        measurement = await drive(server, model, requests, Way())
        return measurement, memory_bytes(gateway, "VmHWM") - before


def _allow_files(count: int) -> None:
    """Let this process, and those that it starts, open so many files, where the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _show_streams(
    console: Console,
    settings: ScaleSettings,
    measurement: Measurement,
    num_bytes: int,
    others_share: float,
) -> dict[str, object]:
    wrong = measurement.token_errors
    figures: dict[str, object] = {
        "streams": len(measurement.timelines),
        "most_streams_at_once": _most_at_once(measurement),
        "failed": len(measurement.errors),
        "total_output_tokens": measurement.num_tokens,
        "lost_tokens": wrong.num_lost,
        "repeated_tokens": wrong.num_repeated,
        "foreign_tokens": wrong.num_foreign,
        "unproved_streams": wrong.num_unproved,
        "gateway_bytes_a_stream": num_bytes / len(measurement.timelines),
        "output_throughput": measurement.tokens_per_s,
        **measurement.summary(("ttft", "itl", "e2el"), (99,)),
        "cpu_used_by_others": others_share,
    }
    name = settings.names[0]
    streams = f"{len(measurement.timelines):,} streams of {name} over HTTP"
    console.print(f"{streams}, {settings.num_tokens} tokens each", highlight=False)
    table = Table()
    table.add_column("figure")
    table.add_column("", justify="right")
    for key, value in figures.items():
        table.add_row(key, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}")
    console.print(table)
    for line in told_errors(measurement):
        print(line, file=sys.stderr)
    return figures


def _most_at_once(measurement: Measurement) -> int:
    """Return how many streams were between their first and their last token at one moment."""
    timelines = [timeline for timeline in measurement.completed if timeline.tokens_s]
    steps = [(timeline.tokens_s[0], 1) for timeline in timelines] + [
        (timeline.tokens_s[-1], -1) for timeline in timelines
    ]
    most = now = 0
    for _, step in sorted(steps):
        now += step
        most = max(most, now)
    return most


def _show_depths(
    console: Console, settings: ScaleSettings, depths: Sequence[AtDepth]
) -> list[dict[str, object]]:
    title = f"One call, with so many jobs of {settings.num_tenants:,} tenants waiting"
    table = Table(title=title, title_justify="left")
    for column in ("call", "figure"):
        table.add_column(column, no_wrap=True)
    for column in (*(f"{at_depth.num_waiting:,}" for at_depth in depths), "last / first"):
        table.add_column(column, justify="right")
    for call in depths[0].calls:
        costs = [at_depth.calls[call] for at_depth in depths]
        for number, (name, figures) in enumerate(_figures(costs).items()):
            ratio = f"{figures[-1] / figures[0]:.2f}" if figures[0] else ""
            cells = [f"{figure:,.0f}" if figure >= 100 else f"{figure:.1f}" for figure in figures]
            table.add_row("" if number else call, name, *cells, ratio)
    table.add_row(
        "memory", "bytes a job", *(f"{at_depth.memory_bytes_a_job:,.0f}" for at_depth in depths), ""
    )
    console.print(table)
    console.print(f"Each job has a prompt of {len(PROMPT)} bytes.", highlight=False)
    return [
        {
            "num_waiting": at_depth.num_waiting,
            "memory_bytes_a_job": at_depth.memory_bytes_a_job,
            **{name: _written(cost) for name, cost in at_depth.calls.items()},
        }
        for at_depth in depths
    ]


def _figures(costs: Sequence[CallCost]) -> dict[str, list[float]]:
    return {
        "commands": [cost.of_server.commands for cost in costs],
        "server us": [cost.of_server.script_us for cost in costs],
        "round trip us": [cost.round_trip_us for cost in costs],
    }


def _written(cost: CallCost) -> dict[str, float]:
    return {
        "commands": cost.of_server.commands,
        "script_us": cost.of_server.script_us,
        "round_trip_us": cost.round_trip_us,
    }

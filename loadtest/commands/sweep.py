"""`penstock bench sweep`: throughput against latency, from one client to many."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Self

import uvloop
from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode
from rich.console import Console
from rich.table import Table

from penstock.loadtest.engines.cases import named_targets
from penstock.loadtest.engines.own import OwnSettings, flags
from penstock.loadtest.engines.system import serving
from penstock.loadtest.errors import BadOption
from penstock.loadtest.machine.usage import Neighbours, description
from penstock.loadtest.report.points import (
    Point,
    by_server,
    is_past_the_knee,
    knee,
    told_of_loads,
)
from penstock.loadtest.report.serving import told_errors
from penstock.loadtest.requests.dataset import DatasetName, DatasetSettings
from penstock.loadtest.requests.drive import drive, warm_up
from penstock.loadtest.requests.goals import Slos
from penstock.loadtest.requests.http_stream import Target, first_model
from penstock.loadtest.requests.way import Way
from penstock.loadtest.requests.workload import varied
from penstock.schemas.process.start import load_settings, words_of

PROGRAM = "penstock bench sweep"
OWN_SERVER = "Penstock"
A_CLIENT = 8  # requests that each client sends, if there are so many
MOST_DOUBLINGS = 12


class SweepSettings(OwnSettings, DatasetSettings):
    """Output tokens a second against latency, for a growing number of clients or of requests a
    second. A Penstock is started for it; servers that run are measured beside it, in turn.
    """

    dataset_name: DatasetName = "penstock-W"
    url: Annotated[list[str], NoDecode, BeforeValidator(words_of)] = Field(
        default_factory=list, description="name=http://host:port/v1 of servers to put beside it"
    )
    concurrencies: Annotated[
        list[Annotated[int, Field(ge=1)]], NoDecode, BeforeValidator(words_of)
    ] = Field(
        default_factory=lambda: [1, 2, 4, 8, 16, 32, 64],
        description=f"requests at once; each client asks {A_CLIENT}, or as many as there are",
    )
    request_rates: Annotated[
        list[Annotated[float, Field(gt=0)]], NoDecode, BeforeValidator(words_of)
    ] = Field(default_factory=list, description="instead: requests a second, all of them asked")
    to_knee: bool = Field(
        False,
        description="from the last of --request-rates on (none: 1) the double, until it is past "
        "the knee; then two rates beside the knee",
    )
    goodput: Slos = Field(
        default_factory=dict,
        description="milliseconds that a good request keeps, as 'ttft:200 tpot:50 e2el:2000'",
    )
    plot: Path | None = Field(
        None, description=".png, .svg or .pdf; needs pip install 'penstock[bench]'"
    )
    output_json: Path | None = Field(None, description="write the figures there too")

    @model_validator(mode="after")
    def has_loads_of_its_own(self) -> Self:
        if self.dataset_name == "trace":
            raise ValueError(
                "dataset_name: a trace has its own rate; `penstock bench serve` takes it"
            )
        return self

    @property
    def rates(self) -> list[float]:
        return self.request_rates or ([1.0] if self.to_knee else [])

    def ways(self, points: Sequence[Point]) -> Iterator[Way]:
        """Yield the ways of sending requests. `points` has what our server did until then."""
        if not self.rates:
            yield from (Way(max_concurrency=count) for count in self.concurrencies)
            return
        yield from (Way(request_rate=rate) for rate in self.rates)
        if self.to_knee:
            rate = self.rates[-1]
            for _ in range(MOST_DOUBLINGS):
                if is_past_the_knee(points):
                    break
                rate *= 2
                yield Way(request_rate=rate)
            best = knee(points).load
            yield from (Way(request_rate=best * factor) for factor in (2**-0.5, 2**0.5))


def main(argv: Sequence[str]) -> int:
    settings = load_settings(SweepSettings, PROGRAM, argv)
    if settings.plot is not None:
        _check_plot(settings.plot)
    console = Console()
    if not console.is_terminal:
        console.width = 110
    with Neighbours() as neighbours:
        points = uvloop.run(_measure(settings, console))
    _show(console, settings, points)
    if not settings.url:
        console.print(f"CPU used by others: {neighbours.share:.0%}", highlight=False)
    for point in points:
        for line in told_errors(point.measurement):
            print(f"{point.server}, {point.label}: {line}", file=sys.stderr)
    if settings.output_json is not None:
        result = {
            "machine": description(),
            "told": _told(settings, points),
            "points": [point.figures() for point in points],
        }
        settings.output_json.write_text(json.dumps(result, indent=1) + "\n")
    if settings.plot is not None:
        from penstock.loadtest.report.plot import draw

        draw(settings.plot, _title(settings), points)
    is_whole = not any(point.measurement.token_errors for point in points)
    return 0 if is_whole and any(point.measurement.completed for point in points) else 1


def _check_plot(path: Path) -> None:
    """Check that the plot can be drawn, before anything is measured. Raises BadOption."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise BadOption(f"--plot: {path}: the name ends with .png, .svg or .pdf")
    if find_spec("matplotlib") is None:
        raise BadOption("--plot: it needs matplotlib: pip install 'penstock[bench]'")


async def _measure(settings: SweepSettings, console: Console) -> list[Point]:
    targets = named_targets(settings.url)
    requests = settings.requests(settings.own_vocab_size)
    async with AsyncExitStack() as stack:
        own = serving(settings.model, *flags(settings.given()))
        url, _ = await stack.enter_async_context(own)
        servers = {OWN_SERVER: Target(url)} | targets
        models = {name: first_model(server) for name, server in servers.items()}
        points: dict[str, list[Point]] = {name: [] for name in servers}
        for turn, way in enumerate(settings.ways(points[OWN_SERVER])):
            load = float(way.max_concurrency or way.request_rate)
            label = f"{load:g}" if way.max_concurrency else f"{load:.3g}/s"
            count = way.max_concurrency * A_CLIENT if way.max_concurrency else len(requests)
            turn_requests = varied(requests[:count], turn, settings.own_vocab_size)
            for name, server in servers.items():
                if turn == 0:
                    await warm_up(server, models[name], requests, way)
                with console.status(f"{name}, {label}: {len(turn_requests)} requests"):
                    measurement = await drive(server, models[name], turn_requests, way)
                points[name].append(Point(name, label, load, measurement, settings.goodput))
    in_order = [sorted(of_one, key=lambda point: point.load) for of_one in points.values()]
    return [point for of_one in in_order for point in of_one]


def _title(settings: SweepSettings) -> str:
    name, machine = settings.dataset_name.removeprefix("penstock-"), description()
    return f"{name} on {settings.names[0]}, {machine['cpu']}, {machine['cores']} cores"


def _show(console: Console, settings: SweepSettings, points: Sequence[Point]) -> None:
    table = Table(title=_title(settings), title_justify="left")
    table.add_column("server", no_wrap=True)
    columns = ["tokens/s", "TTFT ms p50", "p99", "ITL ms p50", "p99", "E2EL s p50", "p99"]
    columns += ["good"] if settings.goodput else []
    for column in ("rate" if settings.rates else "at once", *columns):
        table.add_column(column, justify="right")
    for name, of_one in by_server(points):
        for number, point in enumerate(of_one):
            measurement = point.measurement
            of_tokens = [measurement.percentile("ttft", p) for p in (50, 99)]
            of_tokens += [measurement.percentile("itl", p) for p in (50, 99)]
            table.add_row(
                "" if number else name,
                point.label,
                f"{measurement.tokens_per_s:,.0f}",
                *(
                    f"{latency:,.0f}" if latency >= 100 else f"{latency:.1f}"
                    for latency in of_tokens
                ),
                *(f"{measurement.percentile('e2el', p) / 1e3:.2f}" for p in (50, 99)),
                *([f"{point.share_good:.0%}"] if settings.goodput else []),
            )
    console.print(table)
    for sentence in _told(settings, points):
        console.print(sentence, highlight=False, markup=False)


def _told(settings: SweepSettings, points: Sequence[Point]) -> list[str]:
    return [
        sentence
        for _, of_one in by_server(points)
        for sentence in told_of_loads(of_one, settings.goodput)
    ]

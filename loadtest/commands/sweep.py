"""`penstock bench sweep`: throughput against latency, from one client to many."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import uvloop
from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode
from rich.console import Console
from rich.table import Table

from penstock.loadtest.engines.cases import named_targets
from penstock.loadtest.engines.own import OwnSettings, flags
from penstock.loadtest.engines.system import serving
from penstock.loadtest.errors import BadOption
from penstock.loadtest.machine.usage import Neighbours, description
from penstock.loadtest.report.points import Point, by_server
from penstock.loadtest.requests.dataset import DatasetName, DatasetSettings
from penstock.loadtest.requests.drive import Way, drive, warm_up
from penstock.loadtest.requests.http_stream import Target, first_model
from penstock.loadtest.requests.workload import varied
from penstock.schemas.process.start import load_settings, words_of

PROGRAM = "penstock bench sweep"
OURS = "Penstock"
A_CLIENT = 8  # requests that each client sends, if there are so many


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
    plot: Path | None = Field(
        None, description=".png, .svg or .pdf; needs pip install 'penstock[bench]'"
    )
    output_json: Path | None = Field(None, description="write the figures there too")

    def ways(self) -> list[tuple[str, Way]]:
        """Return the ways of sending requests, each with a label."""
        if self.request_rates:
            return [(f"{rate:g}/s", Way(request_rate=rate)) for rate in self.request_rates]
        return [(f"{count}", Way(max_concurrency=count)) for count in self.concurrencies]


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
        for error, count in Counter(point.found.errors).items():
            print(f"{point.server}, {point.label}: {count} failed: {error}", file=sys.stderr)
    if settings.output_json is not None:
        written = {"machine": description(), "points": [point.figures() for point in points]}
        settings.output_json.write_text(json.dumps(written, indent=1) + "\n")
    if settings.plot is not None:
        from penstock.loadtest.report.plot import draw

        draw(settings.plot, _title(settings), points)
    return 0 if any(point.found.completed for point in points) else 1


def _check_plot(path: Path) -> None:
    """Check that the plot can be drawn, before anything is measured. Raises BadOption."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise BadOption(f"--plot: {path}: the name ends with .png, .svg or .pdf")
    if find_spec("matplotlib") is None:
        raise BadOption("--plot: it needs matplotlib: pip install 'penstock[bench]'")


async def _measure(settings: SweepSettings, console: Console) -> list[Point]:
    given = named_targets(settings.url)
    requests = settings.requests(settings.own_vocab_size)
    async with AsyncExitStack() as stack:
        own = serving(settings.model, *flags(settings.given()))
        url, _ = await stack.enter_async_context(own)
        servers = {OURS: Target(url)} | given
        models = {name: first_model(server) for name, server in servers.items()}
        points = []
        for turn, (label, way) in enumerate(settings.ways()):
            count = way.max_concurrency * A_CLIENT if way.max_concurrency else len(requests)
            asked = varied(requests[:count], turn, settings.own_vocab_size)
            for name, server in servers.items():
                if turn == 0:
                    await warm_up(server, models[name], requests, way)
                with console.status(f"{name}, {label}: {len(asked)} requests"):
                    found = await drive(server, models[name], asked, way)
                points.append(Point(name, label, found))
    return sorted(points, key=lambda point: list(servers).index(point.server))


def _title(settings: SweepSettings) -> str:
    name, machine = settings.dataset_name.removeprefix("penstock-"), description()
    return f"{name} on {settings.names[0]}, {machine['cpu']}, {machine['cores']} cores"


def _show(console: Console, settings: SweepSettings, points: Sequence[Point]) -> None:
    table = Table(title=_title(settings), title_justify="left")
    table.add_column("server", no_wrap=True)
    columns = ("tokens/s", "TTFT ms p50", "p99", "ITL ms p50", "p99", "E2EL s p50", "p99")
    for column in ("rate" if settings.request_rates else "at once", *columns):
        table.add_column(column, justify="right")
    for name, of_one in by_server(points):
        for number, point in enumerate(of_one):
            found = point.found
            of_tokens = [found.percentile("ttft", p) for p in (50, 99)]
            of_tokens += [found.percentile("itl", p) for p in (50, 99)]
            table.add_row(
                "" if number else name,
                point.label,
                f"{found.tokens_per_s:,.0f}",
                *(f"{each:,.0f}" if each >= 100 else f"{each:.1f}" for each in of_tokens),
                *(f"{found.percentile('e2el', p) / 1e3:.2f}" for p in (50, 99)),
            )
    console.print(table)

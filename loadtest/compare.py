"""`penstock bench compare`: the engine beside transformers on the same requests, in one run."""

import json
import tempfile
from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.table import Table

from loadtest.apart import in_a_process
from loadtest.measurement import Measurement
from loadtest.shape import save_135m
from loadtest.subjects import BATCHED, ONE_BY_ONE, PENSTOCK, SUBJECTS
from loadtest.workload import DESCRIPTIONS, NUM_REQUESTS, Name, workloads
from schemas.process import Settings, load_settings
from worker.bundled.paths import BUNDLED_MODEL


class BenchSettings(Settings):
    """Tokens a second and latencies, beside transformers, in one run."""

    model: Path | None = Field(
        None, description="a checkpoint's folder; none: the bundled model and a 135M shape"
    )
    workload: Name = Field(
        "W", description="; ".join(f"{name}: {text}" for name, text in DESCRIPTIONS.items())
    )
    one_by_one: int = Field(
        16, ge=1, le=NUM_REQUESTS, description="how many requests `generate` is given"
    )


def main(argv: list[str]) -> int:
    settings = load_settings(BenchSettings, "penstock bench compare", argv)
    console = Console()
    if not console.is_terminal:
        console.width = 110
    if settings.model is not None:
        _compare(console, settings.model.name, settings.model, settings)
        return 0
    _compare(console, f"{BUNDLED_MODEL.name} (bundled)", BUNDLED_MODEL, settings)
    with tempfile.TemporaryDirectory() as folder:
        in_a_process(save_135m, Path(folder))
        _compare(console, "135M Llama shape, random weights, bf16", Path(folder), settings)
    return 0


def _compare(console: Console, title: str, folder: Path, settings: BenchSettings) -> None:
    requests = workloads(_vocab_size(folder))[settings.workload]
    given = {PENSTOCK: requests, BATCHED: requests, ONE_BY_ONE: requests[: settings.one_by_one]}
    found: dict[str, Measurement] = {}
    for name, some in given.items():
        with console.status(f"{title}: {name}, {len(some)} requests"):
            found[name] = in_a_process(SUBJECTS[name], folder, some)
    console.print(_table(f"{title}, workload {settings.workload}", found))
    ours = found[PENSTOCK].tokens_per_s
    for name in (ONE_BY_ONE, BATCHED):
        console.print(f"  {ours / found[name].tokens_per_s:.1f} times transformers' {name}")
    console.print()


def _table(title: str, found: dict[str, Measurement]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("engine", no_wrap=True)
    for column in (
        "requests",
        "tokens",
        "tokens/s",
        "TTFT ms p50",
        "p99",
        "inter-token ms p50",
        "p90",
        "p99",
    ):
        table.add_column(column, justify="right")
    for name, one in found.items():
        figures = (one.ttft_ms(50), one.ttft_ms(99), one.itl_ms(50), one.itl_ms(90), one.itl_ms(99))
        table.add_row(
            name,
            str(len(one.timelines)),
            str(one.num_tokens),
            f"{one.tokens_per_s:.0f}",
            *(f"{figure:.0f}" if figure >= 100 else f"{figure:.1f}" for figure in figures),
        )
    return table


def _vocab_size(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])

"""`penstock bench diff A.json B.json`: two files of results beside each other, with ratios."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.table import Table

from penstock.loadtest.errors import BadOption
from penstock.loadtest.report.result_file import ResultFile, differences
from penstock.schemas.process.start import Settings, load_settings

PROGRAM = "penstock bench diff"
_MORE_IS_BETTER = ("throughput", "goodput", "completed", "fraction_of_limit")
_LESS_IS_BETTER = ("_ms", "_tokens", "failed", "duration", "_streams", "_s", "_bytes")
_COUNTS = ("total_input_tokens", "total_output_tokens")  # the work's size: not good nor bad
_NOISE = 0.02  # a smaller difference is not called better or worse


class DiffSettings(Settings):
    """Two files of results beside each other: those of `serve`, `sweep` or `compare`."""

    before: CliPositionalArg[Path] = Field(description="a file of results")
    after: CliPositionalArg[Path] = Field(description="another, divided by the first")


def main(argv: Sequence[str]) -> int:
    settings = load_settings(DiffSettings, PROGRAM, argv)
    a, b = ResultFile.read(settings.before), ResultFile.read(settings.after)
    console = Console()
    if not console.is_terminal:
        console.width = 110
    machines, options = differences(a, b)
    names = [name for name in a.sections() if name in b.sections()]
    if not names:
        raise BadOption(f"{settings.before} and {settings.after} have no load in common")
    for name in names:
        console.print(_table(name, a, b))
    for name in {*a.sections(), *b.sections()} - {*names}:
        console.print(f"in one file only: {name}", highlight=False, markup=False)
    for title, lines in ("The machines differ", machines), ("Not the same was asked", options):
        if lines:
            console.print("\n  ".join([f"{title}:", *lines]), highlight=False, markup=False)
    return 0


def _table(name: str, a: ResultFile, b: ResultFile) -> Table:
    table = Table(title=name or None, title_justify="left")
    table.add_column("figure", no_wrap=True)
    for column in (a.name, b.name, "ratio", ""):
        table.add_column(column, justify="right")
    before, after = a.sections()[name], b.sections()[name]
    for key in [key for key in before if key in after]:
        ratio = after[key] / before[key] if before[key] else None
        table.add_row(
            key,
            *(f"{figures[key]:,.2f}".removesuffix(".00") for figures in (before, after)),
            "" if ratio is None else f"{ratio:.2f}",
            _verdict(key, before[key], after[key]),
        )
    return table


def _verdict(key: str, before: float, after: float) -> str:
    if abs(after - before) <= _NOISE * abs(before) or key in _COUNTS:
        return ""
    if any(word in key for word in _MORE_IS_BETTER):
        return "better" if after > before else "worse"
    if key.endswith(_LESS_IS_BETTER):
        return "better" if after < before else "worse"
    return ""

"""The comparison's tables, and the same figures as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from penstock.loadtest.lab.machine.speeds import Speeds
from penstock.loadtest.machine.usage import description
from penstock.loadtest.requests.measurement import Measurement

_PERCENTILES = (50, 90, 99)
_LIBRARIES = ("penstock", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one engine: its measurement, or the reason why it failed."""

    measurement: Measurement | None
    others_share: float  # share of the CPU that others used
    peak_bytes: int
    failure: str = ""
    neighbour: float = 0.0  # share of the CPU that the requested neighbour got

    @property
    def tokens_per_s(self) -> float:
        return self.measurement.tokens_per_s if self.measurement else 0.0


@dataclass(slots=True)
class Row:
    name: str
    note: str
    rounds: list[Round] = field(default_factory=list)

    @property
    def middle(self) -> Round:
        """Return the round with the median throughput; of an even number the worse one."""
        return sorted(self.rounds, key=lambda run: run.tokens_per_s)[(len(self.rounds) - 1) // 2]

    def times(self, row: "Row") -> str:
        """Return how many times the other row's throughput it has, by rounds, with the spread."""
        pairs = zip(self.rounds, row.rounds, strict=False)
        ratios = [
            own.tokens_per_s / rival.tokens_per_s for own, rival in pairs if rival.tokens_per_s
        ]
        span = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
        return f"{median(ratios):.2f}{span} times"


@dataclass(slots=True)
class Section:
    """The part of the tables for one workload with so many requests at once."""

    name: str
    workload: str
    concurrency: int
    limits_tokens_per_s: dict[str, float | None]  # for each row; higher for weights with fewer bits
    rows: list[Row]
    lines: list[str] = field(default_factory=list)


def machine_line(speeds: Speeds) -> str:
    machine = description()
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {machine['cpu']}, {machine['cores']} cores "
        f"({', '.join(map(str, _listed(machine['features']))) or 'no vectors that count'}): "
        f"reads {speeds.memory_bytes_per_s / 1e9:.1f} GB/s, "
        f"multiplies at {speeds.flops_per_s / 1e9:,.0f} GFLOP/s, "
        f"int8 at {speeds.int8_flops_per_s / 1e9:,.0f}"
    )


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


CAPTION = (
    "limit: a step takes max((weights + KV of the contexts) / B, (2 x parameters x tokens "
    "+ attention) / F), with B and F as measured and nothing else taking time; "
    "others: the share of the CPU that they used"
)


def show(console: Console, section: Section) -> None:
    table = Table(title=f"{section.name}: {section.workload}", title_justify="left")
    table.add_column("engine", no_wrap=True)
    for column in (
        "tok/s",
        "limit",
        "reached",
        "TTFT ms p50",
        "p99",
        "ITL ms p50",
        "p99",
        "start s",
        "peak MB",
        "others",
    ):
        table.add_column(column, justify="right")
    for row in section.rows:
        table.add_row(
            row.name + row.note, *_figures(row.middle, section.limits_tokens_per_s[row.name])
        )
    console.print(table)
    for line in section.lines:
        console.print(f"  {line}", highlight=False)
    for row in section.rows:
        for run in row.rounds:
            errors = [run.failure] if run.measurement is None else run.measurement.errors
            for error in sorted({error for error in errors if error}):
                console.print(f"  {row.name}: {errors.count(error)} failed: {error}", markup=False)
    console.print()


def _figures(run: Round, limit: float | None) -> list[str]:
    measurement = run.measurement
    if measurement is None or not measurement.completed:
        return ["failed", *[""] * 8, f"{run.others_share:.0%}"]
    return [
        f"{measurement.tokens_per_s:,.0f}",
        "" if limit is None else f"{limit:,.0f}",
        "" if limit is None else f"{measurement.tokens_per_s / limit:.0%}",
        *(_ms(measurement.ttft_ms(percent)) for percent in (50, 99)),
        *(_ms(measurement.itl_ms(percent)) for percent in (50, 99)),
        f"{measurement.start_s:.1f}" if measurement.start_s else "",
        f"{run.peak_bytes / 1e6:,.0f}" if run.peak_bytes else "",
        f"{run.others_share:.0%}",
    ]


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def write_results(path: Path, speeds: Speeds, sections: Sequence[Section]) -> None:
    """Write the figures, with date, machine and the CPU that others used, but no host name."""
    result = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": description(),
        "read_bytes_per_s": speeds.memory_bytes_per_s,
        "read_bytes_per_s_of": speeds.reads,
        "flops_per_s": speeds.flops_per_s,
        "int8_flops_per_s": speeds.int8_flops_per_s,
        "versions": {name: _version(name) for name in _LIBRARIES},
        "limit": CAPTION,
        "cases": [_case(section) for section in sections],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _case(section: Section) -> dict[str, object]:
    return {
        "name": section.name,
        "workload": section.workload,
        "max_concurrency": section.concurrency,
        "engines": [_engine(row, section.limits_tokens_per_s[row.name]) for row in section.rows],
        "lines": section.lines,
    }


def _engine(row: Row, limit: float | None) -> dict[str, object]:
    middle = row.middle
    figures: dict[str, object] = {
        "name": row.name,
        "output_throughput_of_rounds": [run.tokens_per_s for run in row.rounds],
        "cpu_used_by_others_of_rounds": [run.others_share for run in row.rounds],
        "failures": [run.failure for run in row.rounds if run.failure],
    }
    if middle.measurement is None:
        return figures
    return figures | {
        "completed": len(middle.measurement.completed),
        "failed": len(middle.measurement.errors),
        "total_output_tokens": middle.measurement.num_tokens,
        "output_throughput": middle.measurement.tokens_per_s,
        "limit_tokens_per_s": limit,
        "fraction_of_limit": None if limit is None else middle.measurement.tokens_per_s / limit,
        "start_s": middle.measurement.start_s or None,
        "peak_resident_bytes": middle.peak_bytes or None,
        **middle.measurement.summary(("ttft", "itl", "tpot"), _PERCENTILES),
    }

"""`penstock bench queue`: the costs of the way through the queue, beside the goals for them."""

import asyncio
import json
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.table import Table

from penstock.loadtest.engines.own import vocab_size
from penstock.loadtest.engines.subjects import Task, llm
from penstock.loadtest.lab.engines import queue_path
from penstock.loadtest.machine.apart import in_a_process
from penstock.loadtest.machine.usage import Neighbours
from penstock.loadtest.requests.measurement import Measurement
from penstock.loadtest.requests.workload import Request, workloads
from penstock.schemas.process.start import Settings, load_settings
from penstock.worker.bundled.paths import BUNDLED_MODEL

NUM_STREAMS = 64
ROUNDS = 3  # alternating; the middle one counts


class QueueBenchSettings(Settings):
    """The queue's latencies and costs with an engine that computes nothing, beside the goals."""

    only: str = Field("", description="measure only lines whose name contains this")
    num_tokens: int = Field(200, ge=10, le=4000, description="of each stream")
    json_file: Path | None = Field(None, description="write the figures there too")


@dataclass(frozen=True, slots=True)
class Goal:
    """One measurement, with its goals: how high (or, with `at_least`, how low) a figure may be."""

    name: str
    measure: Callable[[int], Awaitable[queue_path.Figures]]
    goals: dict[str, float]
    at_least: bool = False


LINES = [
    Goal(
        "step's end to reader, 64 streams",
        lambda tokens: queue_path.delivery(64, tokens),
        {"p50_ms": 2, "p99_ms": 8, "worker_us": 6},
    ),
    Goal(
        "step's end to reader, 256 streams",
        lambda tokens: queue_path.delivery(256, tokens),
        {"p50_ms": 4, "p99_ms": 10, "worker_us": 6},
    ),
    Goal(
        "enqueue to a worker, 16 at once",
        lambda tokens: queue_path.enqueue(16, 40),
        {"p50_ms": 1, "p99_ms": 5},
    ),
    Goal(
        "jobs put in by one process",
        lambda tokens: queue_path.submissions(40 * tokens, 64),
        {"jobs_per_s": 4000},
        at_least=True,
    ),
    Goal(
        "jobs put in, durability fsync",
        lambda tokens: queue_path.submissions(40 * tokens, 64, "fsync"),
        {},
    ),
    Goal(
        "jobs put in, durability replicas",
        lambda tokens: queue_path.submissions(40 * tokens, 64, "replicas"),
        {},
    ),
    Goal("SSE in the gateway, per token", lambda tokens: queue_path.sse(64, tokens), {"us": 20}),
    Goal("crash to the next token", lambda tokens: queue_path.crash(100), {"pause_s": 6}),
    Goal("overhead, fake engine", lambda tokens: overhead_fake(tokens), {"percent": 2}),
    Goal("overhead, bundled model", lambda tokens: overhead_bundled(), {"percent": 2}),
]


async def overhead_fake(num_tokens: int) -> queue_path.Figures:
    """Measure the tokens a second lost against the same engine, called in this process.

    Both take the same time for a step.
    """
    requests = [Request([50], num_tokens) for _ in range(NUM_STREAMS)]
    flags = (*queue_path.FAKE, "--fake-step-ms", str(queue_path.STEP_MS))
    return await _overhead(
        lambda: in_a_process(queue_path.in_process, requests),
        lambda: queue_path.through(requests, *flags),
    )


async def overhead_bundled() -> queue_path.Figures:
    """Measure the same loss with the bundled model, on workload W of the comparison."""
    requests = workloads(vocab_size(BUNDLED_MODEL))["W"]
    task = Task(BUNDLED_MODEL, requests, len(requests))
    return await _overhead(
        lambda: llm(task),
        lambda: queue_path.through(requests, "--model", str(BUNDLED_MODEL)),
    )


async def _overhead(
    alone: Callable[[], Measurement], through: Callable[[], Awaitable[Measurement]]
) -> queue_path.Figures:
    alone_per_s, through_per_s = list[float](), list[float]()
    for _ in range(ROUNDS):
        alone_per_s.append(alone().tokens_per_s)
        through_per_s.append((await through()).tokens_per_s)
    most, rest = statistics.median(alone_per_s), statistics.median(through_per_s)
    return {
        "percent": (1 - rest / most) * 100,
        "alone_tokens_per_s": most,
        "through_tokens_per_s": rest,
    }


def main(argv: list[str]) -> int:
    settings = load_settings(QueueBenchSettings, "penstock bench queue", argv)
    console = Console()
    if not console.is_terminal:
        console.width = 110
    table = Table(title="The queue's path", title_justify="left")
    for column in ("what", "figure", "goal", "measured", "", "CPU used by others"):
        table.add_column(column, justify="left" if column in ("what", "figure") else "right")
    results: list[dict[str, object]] = []
    for line in LINES:
        if settings.only not in line.name:
            continue
        with console.status(line.name):
            figures, others_share = _measured(line, settings.num_tokens)
        results.append({"what": line.name, "others": others_share, **figures})
        for row in _rows(line, figures, others_share):
            table.add_row(*row)
    console.print(table)
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _measured(line: Goal, num_tokens: int) -> tuple[queue_path.Figures, float]:
    async def measure() -> queue_path.Figures:
        return await line.measure(num_tokens)

    with Neighbours() as neighbours:
        figures = asyncio.run(measure())
    return figures, neighbours.share


def _rows(line: Goal, figures: queue_path.Figures, others_share: float) -> list[list[str]]:
    rows: list[list[str]] = []
    for name, value in figures.items():
        goal = line.goals.get(name)
        is_met = goal is not None and (value >= goal if line.at_least else value <= goal)
        verdict = "" if goal is None else "met" if is_met else "missed"
        cells = ["" if rows else line.name, name.replace("_", " ")]
        cells += ["" if goal is None else f"{goal:g}", f"{value:,.1f}", verdict]
        rows.append([*cells, "" if rows else f"{others_share:.0%}"])
    return rows

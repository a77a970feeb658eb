"""`penstock bench compare`: engines beside each other on the same requests, in one run.

Rounds alternate: each engine runs once before any runs again, and of its rounds the one with the
middle throughput counts. Servers of this machine stand still while another engine is measured. No
two rounds or workloads share a prefix, so a server that stays up does not find an earlier round's
prompts in its cache.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode
from rich.console import Console

from penstock.loadtest.engines.cases import (
    BATCH,
    BESIDE,
    CACHELESS,
    CASES,
    DETERMINISTIC,
    INT8,
    LLM,
    QUEUE,
    Case,
    servers,
)
from penstock.loadtest.engines.own import OwnSettings, vocab_size
from penstock.loadtest.engines.subjects import Subject, Task, vllm_in_process
from penstock.loadtest.errors import BadOption, CannotMeasure
from penstock.loadtest.lab.cache_cost import cache_cost_s
from penstock.loadtest.lab.engines.shape import save_shape
from penstock.loadtest.lab.machine.limit import limit_tokens_per_s, shape_of
from penstock.loadtest.lab.machine.neighbour import busy
from penstock.loadtest.lab.machine.speeds import Speeds, measure_speeds
from penstock.loadtest.lab.report.tables import (
    CAPTION,
    Round,
    Row,
    Section,
    machine_line,
    show,
    write_results,
)
from penstock.loadtest.machine.apart import in_a_process
from penstock.loadtest.machine.usage import Neighbours, listener, stopped
from penstock.loadtest.requests.dataset import read
from penstock.loadtest.requests.workload import DESCRIPTIONS, Request, varied, workloads
from penstock.schemas.process.start import load_settings, words_of
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.process.model_folder import model_folder

PROGRAM = "penstock bench compare"
_OWN_LINES = {
    QUEUE.name: "{:.0%} of it through the queue",
    DETERMINISTIC.name: "{:.0%} of it in deterministic mode",
    INT8.name: "{:.2f} times it with int8 weights",
    CACHELESS.name: "{:.0%} of it without the prefix cache",
    BESIDE.name: "{:.0%} of it beside a neighbour",
}
Words = Annotated[list[str], NoDecode, BeforeValidator(words_of)]


class CompareSettings(OwnSettings):
    """Penstock, in process and through its queue, beside transformers and any OpenAI server.

    Each setting of a worker is one of the Penstock's that is measured.
    """

    model: str = Field(
        "", description="none: a 135M Llama shape with random weights; for json the bundled model"
    )
    url: Words = Field(
        default_factory=list,
        description="name=http://host:port/v1 of servers to put beside it; those of this machine "
        "stand still while another engine is measured",
    )
    dataset_path: Path | None = Field(
        None,
        description="a workload of your own: lines as `penstock bench files` writes them; "
        "none: " + "; ".join(f"{name}: {text}" for name, text in DESCRIPTIONS.items()),
    )
    only: Words = Field(
        default_factory=list, description="cases whose name has one of these, such as 'W 64,one'"
    )
    engines: Words = Field(default_factory=list, description="those whose name has one of these")
    vllm: Path | None = Field(
        None, description="Python of an environment that has vLLM: its engine in process, too"
    )
    rounds: int = Field(3, ge=1, description="alternating; of each engine the middle one counts")
    sample: int = Field(8, ge=1, description="requests that `generate` is given")
    neighbour: float = Field(
        0.0, ge=0, le=1, description="also beside processes that want this share of all cores"
    )
    output_json: Path | None = Field(None, description="write the figures there too")


def main(argv: Sequence[str]) -> int:
    settings = load_settings(CompareSettings, PROGRAM, argv)
    console = Console()
    if not console.is_terminal:
        console.width = 124
    own = read(settings.dataset_path, output_len=128) if settings.dataset_path else []
    cases = _cases(settings)
    with tempfile.TemporaryDirectory() as scratch:
        comparison = _Comparison(settings, own, console, Path(scratch))
        with suppress(KeyboardInterrupt):  # what was measured until then is shown
            for number in range(settings.rounds):
                comparison.measure_speeds()
                for place, case in enumerate(cases):
                    comparison.run(case, turn=number * len(cases) + place)
        measured_cases = [comparison.measured(case) for case in cases]
        sections = [comparison.section(case) for case in measured_cases if case.subjects]
    console.print(machine_line(comparison.speeds), highlight=False)
    console.print(f"{CAPTION}\n", highlight=False)
    for section in sections:
        show(console, section)
    if settings.output_json is not None:
        write_results(settings.output_json, comparison.speeds, sections)
    is_whole = all(
        row.middle.measurement is not None for section in sections for row in section.rows
    )
    return 0 if is_whole else 1


def _cases(settings: CompareSettings) -> list[Case]:
    """Return the cases and engines that were asked for. Raises BadOption if there are none."""
    cases = list(CASES)
    if settings.dataset_path is not None:
        subjects = (LLM, QUEUE, BATCH)
        cases = [Case(f"file {count}", None, count, subjects) for count in (64, 8, 1)]
    rivals = servers(settings.url)
    if settings.vllm is not None:
        if not os.access(settings.vllm, os.X_OK):
            raise BadOption(f"--vllm: {settings.vllm} is no Python; name that of its environment")
        rivals.append(Subject("vLLM LLM", vllm_in_process(settings.vllm)))
    selection = []
    for case in cases:
        beside = [BESIDE] if settings.neighbour and LLM in case.subjects else []
        engines = [
            subject
            for subject in [*case.subjects, *beside, *rivals]
            if not settings.engines or any(word in subject.name for word in settings.engines)
        ]
        is_asked = not settings.only or any(word in case.name for word in settings.only)
        if engines and is_asked:
            selection.append(case.of(engines))
    if not selection:
        names = ", ".join(case.name for case in cases)
        raise BadOption(f"--only, --engines: they leave nothing; cases are {names}")
    return selection


def like_with_like(subjects: Sequence[Subject], rows: Mapping[str, Row]) -> Iterator[str]:
    """Yield how many times the throughput of each engine of others ours has.

    `rows` are those that were measured, by name. What is served stands beside our server, what is
    in process beside `LLM`.
    """
    for subject in subjects:
        own_row = rows.get(QUEUE.name if subject.is_served else LLM.name)
        if own_row is not None and subject.name in rows and not subject.is_ours:
            how = "served" if subject.is_served else "in process"
            yield f"{own_row.times(rows[subject.name])} {subject.name}, {how}"


class _Comparison:
    def __init__(
        self, settings: CompareSettings, own: list[Request], console: Console, scratch: Path
    ) -> None:
        self.speeds = Speeds({}, 0.0, 0.0)
        self._settings = settings
        self._own = own
        self._console = console
        self._scratch = scratch
        self._rows: dict[tuple[str, str], Row] = {}

    def measure_speeds(self) -> None:
        with self._console.status("the machine's memory and products"):
            self.speeds = self.speeds.at_least(in_a_process(measure_speeds))

    def run(self, case: Case, turn: int) -> None:
        """Measure each engine of a case once."""
        folder = self._folder(case)
        requests = varied(self._requests(case), turn, vocab_size(folder))
        listeners = {
            subject.name: listener(subject.port)
            for subject in case.subjects
            if subject.port is not None
        }
        for subject in case.subjects:
            note = f" ({self._settings.sample} requests)" if subject.sampled else ""
            own = {"kv_cache_memory_bytes": case.pool_bytes} | self._settings.given()
            batch = requests[: self._settings.sample] if subject.sampled else requests
            task = Task(folder, batch, case.concurrency, own | subject.settings)
            with self._console.status(f"{case.name}: {subject.name}, {len(batch)} requests"):
                pids = [pid for name, pid in listeners.items() if pid and name != subject.name]
                with stopped(pids):
                    result = self._measured(subject, task)
            row = self._rows.setdefault((case.name, subject.name), Row(subject.name, note))
            row.rounds.append(result)
            outcome = result.failure or f"{result.tokens_per_s:,.0f} tokens/s"
            self._console.print(f"{case.name}: {subject.name}: {outcome}", style="dim")

    def measured(self, case: Case) -> Case:
        """Return the case with only the engines that have had a round."""
        return case.of(
            [subject for subject in case.subjects if (case.name, subject.name) in self._rows]
        )

    def _measured(self, subject: Subject, task: Task) -> Round:
        pid = listener(subject.port) if subject.port is not None else None
        share = self._settings.neighbour if subject.is_beside else 0.0
        with busy(share) as neighbour, Neighbours(pid) as usage:
            try:
                measurement, failure = subject.measure(task), ""
            except CannotMeasure as error:
                measurement, failure = None, str(error)
        return Round(measurement, usage.share, usage.peak_bytes, failure, neighbour.share)

    def section(self, case: Case) -> Section:
        requests = self._requests(case)
        limits = {subject.name: self._limit(case, requests, subject) for subject in case.subjects}
        text = DESCRIPTIONS[case.workload] if case.workload else f"{len(requests)} requests"
        rows = [self._rows[case.name, subject.name] for subject in case.subjects]
        lines = list(self._lines(case, requests, rows))
        return Section(case.name, text, case.concurrency, limits, rows, lines)

    def _limit(self, case: Case, requests: Sequence[Request], subject: Subject) -> float | None:
        """Return the tokens a second of the ideal engine.

        Return None where prompts are texts or answers follow a schema: the ideal engine's model
        is only for prompts of ids and answers of a given length.
        """
        if any(isinstance(request.prompt, str) or request.schema for request in requests):
            return None
        options = self._settings.given() | subject.settings if subject.is_ours else {}
        quantization = options.get("quantization")
        shape = shape_of(self._folder(case), str(quantization) if quantization else None)
        return limit_tokens_per_s(self.speeds, shape, requests, case.concurrency)

    def _lines(self, case: Case, requests: Sequence[Request], rows: Sequence[Row]) -> Iterator[str]:
        """Yield lines that compare the figures with each other, of others like with like."""
        by_name = {row.name: row for row in rows if row.middle.tokens_per_s}
        llm = by_name.get(LLM.name)
        if llm is not None:
            for name, line in _OWN_LINES.items():
                if name in by_name:
                    yield line.format(by_name[name].middle.tokens_per_s / llm.middle.tokens_per_s)
            if BESIDE.name in by_name:
                goal, share = self._settings.neighbour, by_name[BESIDE.name].middle.neighbour
                yield f"  the neighbour wanted {goal:.0%} of the CPU and got {share:.0%}"
        yield from like_with_like(case.subjects, by_name)
        cpu_s = llm.middle.measurement.cpu_s if llm is not None and llm.middle.measurement else 0.0
        if case.workload == "U" and CACHELESS.name in by_name and cpu_s:
            cost_s = cache_cost_s(requests, case.concurrency)
            yield f"{cost_s / cpu_s:.2%} of the CPU time is the prefix cache's"

    def _requests(self, case: Case) -> list[Request]:
        if case.workload is None:
            return self._own
        return workloads(vocab_size(self._folder(case)))[case.workload]

    def _folder(self, case: Case) -> Path:
        if self._settings.model:
            return model_folder(self._settings.model)
        if case.workload == "json":
            return BUNDLED_MODEL
        folder = self._scratch / "135m"
        if not folder.exists():
            in_a_process(save_shape, "135m", folder)
        return folder

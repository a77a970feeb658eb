"""The engines of the comparison. Each answers the same requests, so many at once, greedily.

Each runs in processes of its own, so that none inherits another's memory or threads. Each begins
with one short request, so that set-up on first use is not measured.
"""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvloop

from penstock.loadtest.engines.own import flags
from penstock.loadtest.engines.system import serving
from penstock.loadtest.errors import CannotMeasure
from penstock.loadtest.machine.apart import in_a_process
from penstock.loadtest.requests.drive import drive, proved, warm_up
from penstock.loadtest.requests.http_stream import Target, first_model
from penstock.loadtest.requests.measurement import Measurement, Timeline
from penstock.loadtest.requests.way import Way
from penstock.loadtest.requests.workload import Request


@dataclass(frozen=True, slots=True)
class Task:
    """The task that a subject gets. `settings` are for an engine of ours."""

    folder: Path
    requests: Sequence[Request]
    concurrency: int
    settings: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    measure: Callable[[Task], Measurement]
    settings: dict[str, object] = field(default_factory=dict)
    sampled: bool = False  # slow, so it gets only the first few requests
    is_beside: bool = False  # runs beside a neighbour that takes its share
    url: str = ""  # a server that others started
    port: int | None = None  # the port of such a server on this machine

    @property
    def is_ours(self) -> bool:
        return self.measure in (llm, through_queue)

    @property
    def is_served(self) -> bool:
        """Return whether it is asked by HTTP, and not in process."""
        return self.measure is through_queue or self.url != ""


def llm(task: Task) -> Measurement:
    return in_a_process(_llm, task, time.perf_counter())


def generate(task: Task) -> Measurement:
    return in_a_process(_generate, task, time.perf_counter())


def generate_batch(task: Task) -> Measurement:
    return in_a_process(_generate_batch, task, time.perf_counter())


def through_queue(task: Task) -> Measurement:
    """Measure gateway, Redis and worker, streaming, with the client on the same cores."""

    async def measure() -> Measurement:
        begin_s = time.perf_counter()
        async with serving(str(task.folder), *flags(task.settings)) as (url, _):
            return await _ask(Target(url), task, begin_s)

    return uvloop.run(measure())


def server(target: Target) -> Callable[[Task], Measurement]:
    """Return the function that measures a server that already runs."""

    def measure(task: Task) -> Measurement:
        return replace(uvloop.run(_ask(target, task, 0.0)), start_s=0.0)

    return measure


def vllm_in_process(python: Path) -> Callable[[Task], Measurement]:
    """Return the function that measures vLLM's engine in process, by the Python that has it."""

    def measure(task: Task) -> Measurement:
        if any(request.schema for request in task.requests):
            raise CannotMeasure("vLLM LLM is asked for no answers by a schema; measure its server")
        began_s = time.perf_counter()
        requests = [
            {"prompt": request.prompt, "max_tokens": request.max_tokens}
            for request in task.requests
        ]
        payload = {"model": str(task.folder), "concurrency": task.concurrency, "requests": requests}
        process = subprocess.run(
            [python, Path(__file__).with_name("vllm_in_process.py")],
            input=json.dumps(payload),
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode:
            raise CannotMeasure(f"--vllm: {(process.stderr.splitlines() or ['it ended'])[-1]}")
        answer = json.loads(process.stdout)
        timelines = [
            Timeline(answer["begin_s"], num_prompt, tokens_s)
            for num_prompt, tokens_s in zip(answer["num_prompt"], answer["tokens_s"], strict=True)
        ]
        begin_in_turn(timelines, task.concurrency)
        start_s = answer["first_token_s"] - began_s
        return Measurement(timelines, answer["wall_s"], answer["cpu_s"], start_s)

    return measure


async def _ask(target: Target, task: Task, begin_s: float) -> Measurement:
    way = Way(max_concurrency=task.concurrency)
    model = first_model(target)
    first = await warm_up(target, model, task.requests, way)
    start_s = (first.tokens_s or [begin_s])[0] - begin_s
    return replace(proved(await drive(target, model, task.requests, way)), start_s=start_s)


# The clock is the same in all processes of a machine, so a start counts from before the process.


def _llm(task: Task, begin_s: float) -> Measurement:
    from penstock.loadtest.engines.timed_llm import TimedLLM

    settings = {"max_num_seqs": task.concurrency} | task.settings
    engine = TimedLLM(str(task.folder), **settings)
    prompt = task.requests[0].prompt
    short = Request("Hello" if isinstance(prompt, str) else prompt[::-1][:16], 4)
    (first,) = engine.answer([short]).timelines
    measurement = engine.answer(task.requests)
    begin_in_turn(measurement.timelines, task.concurrency)
    return replace(measurement, start_s=first.tokens_s[0] - begin_s)


def begin_in_turn(timelines: Sequence[Timeline], concurrency: int) -> None:
    """Count requests that were handed over at once from their turn, as if a client had waited.

    Each after the first `concurrency` begins when an earlier one has ended.
    """
    ends = sorted(timeline.tokens_s[-1] for timeline in timelines)
    for timeline, end_s in zip(timelines[concurrency:], ends, strict=False):
        timeline.begin_s = end_s


def _generate(task: Task, begin_s: float) -> Measurement:
    from penstock.loadtest.engines.transformers_subjects import generate

    return generate(task.folder, task.requests, begin_s)


def _generate_batch(task: Task, begin_s: float) -> Measurement:
    from penstock.loadtest.engines.transformers_subjects import generate_batch

    return generate_batch(task.folder, task.requests, task.concurrency, begin_s)

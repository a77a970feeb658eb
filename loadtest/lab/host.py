"""`penstock bench host`: the cost of a step beside the model, which here answers at once.

Engine, scheduler, block pool, batch, runner and sampler are the real ones; a decoder that computes
nothing gives logits over two tokens. It measures two batches. In one all sequences only decode. In
the other each sequence that ends is followed by one with a new prompt. Times are the thread's CPU
time, so a neighbour on its core does not count.
"""

import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from rich.console import Console
from rich.table import Table
from torch import Tensor

from penstock.loadtest.lab.cache_cost import cache_cost_s
from penstock.loadtest.machine.usage import Neighbours
from penstock.loadtest.requests.workload import workloads
from penstock.schemas.params.sampling import SamplingParams
from penstock.schemas.process.start import Settings, load_settings
from penstock.worker.engine.cache.block_pool import BlockPool
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.grammar.constraints import Grammars
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.messages import AddSequence
from penstock.worker.engine.running.batch import PersistentBatch
from penstock.worker.engine.running.runner import ModelRunner
from penstock.worker.engine.sampling.sampler import Sampler
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.layers.batch import Batch

PERCENTAGES = (0, 50, 99)
GOAL_US = {50: "150", 99: "300"}
PARTS = ("inbox", "schedule", "batch", "runner", "sampler", "update")
VOCAB = 2
IDS = 32_000  # ids of prompts are below this
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
NUM_IN, NUM_OUT = 160, 107  # tokens of a changing sequence, as in workload W


class HostSettings(Settings):
    """Microseconds that a step takes without its model."""

    num_seqs: int = Field(256, ge=1, description="sequences that run at once")
    steps: int = Field(1500, ge=10, le=3000, description="of each batch, that count")


class InstantDecoder:
    """A decoder that answers at once, with hidden states and logits of zero."""

    def __call__(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        return torch.zeros(len(batch.token_ids), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), VOCAB)


def main(argv: Sequence[str]) -> int:
    settings = load_settings(HostSettings, "penstock bench host", argv)
    with Neighbours() as neighbours:
        decoding = _measure(settings.num_seqs, settings.steps, replaced=False)
        turnover = _measure(settings.num_seqs, settings.steps, replaced=True)
        requests = workloads(IDS)["U"]
        cache_s = cache_cost_s(requests, len(requests))
    console = Console()
    console.print(_table(settings.num_seqs, {"decoding": decoding, "changing": turnover}))
    num_tokens = sum(len(request.ids) for request in requests)
    console.print(
        f"prefix cache, where nothing is shared: {cache_s / num_tokens * 1e6:.2f} us of CPU a token"
    )
    console.print(f"CPU used by others: {neighbours.share:.0%}")
    return 0


def _table(num_seqs: int, by_batch: dict[str, dict[str, np.ndarray]]) -> Table:
    table = Table(title=f"CPU us of a step beside the model, {num_seqs} sequences")
    table.add_column("part")
    for name in by_batch:
        for percentage in PERCENTAGES:
            figure = f"p{percentage}" if percentage else "least"
            table.add_column(f"{name}, {figure}", justify="right")
    for part in (*PARTS, "step"):
        figures = [np.percentile(times[part], PERCENTAGES) for times in by_batch.values()]
        table.add_row(part, *(f"{figure:.0f}" for figure in np.concatenate(figures)))
    table.add_row("goal", *(GOAL_US.get(percentage, "") for percentage in PERCENTAGES))
    return table


def _measure(num_seqs: int, num_steps: int, replaced: bool) -> dict[str, np.ndarray]:
    """Return the microseconds of each step's parts [steps], and of the whole as `step`."""
    rng = random.Random(0)
    watch = _Watch()
    engine = _engine(num_seqs, watch)
    num_added = 0

    def add() -> None:
        nonlocal num_added
        num_in = rng.randrange(1, 2 * NUM_IN)
        num_out = rng.randrange(1, 2 * NUM_OUT) if replaced else MAX_MODEL_LEN - 2 * NUM_IN
        prompt = [rng.randrange(IDS) for _ in range(num_in)]
        params = SamplingParams(temperature=0.8, max_tokens=num_out, ignore_eos=True)
        engine.add(AddSequence(str(num_added), prompt, params, seed=num_added))
        num_added += 1

    for _ in range(num_seqs):
        add()
    rows = []
    num_warm = NUM_OUT + num_seqs // 10  # until all are admitted, and at different places
    for _ in range(num_warm + num_steps):
        begin_s = time.thread_time()
        outputs = engine.step()
        end_s = time.thread_time()
        rows.append(watch.parts(begin_s, end_s))
        for output in outputs:
            if output.finish_reason is not None:
                add()
    figures = np.array(rows[num_warm:]) * 1e6
    return dict(zip((*PARTS, "step"), figures.T, strict=True))


class _Watch:
    """Times calls by the thread's clock."""

    def __init__(self) -> None:
        self.spans: dict[str, tuple[float, float]] = {}

    def over(self, owner: object, name: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: object) -> object:
            begin_s = time.thread_time()
            result = inner(*args)
            self.spans[name] = begin_s, time.thread_time()
            return result

        setattr(owner, name, outer)

    def parts(self, begin_s: float, end_s: float) -> tuple[float, ...]:
        """Return the seconds of each of PARTS, then their sum.

        The inbox and the update are not watched themselves; they are the rest of the step.
        """
        (scheduled_s, planned_s), (run_s, ran_s) = self.spans["schedule"], self.spans["run"]
        batch_s, sampler_s = (
            end - begin for begin, end in (self.spans["build"], self.spans["draw"])
        )
        runner_s = ran_s - run_s - batch_s - sampler_s
        update_s = end_s - ran_s
        return (
            scheduled_s - begin_s,
            planned_s - scheduled_s,
            batch_s,
            runner_s,
            sampler_s,
            update_s,
            end_s - begin_s,
        )


def _engine(num_seqs: int, watch: _Watch) -> Engine:
    device = torch.device("cpu")
    num_blocks = num_seqs * MAX_MODEL_LEN // BLOCK_SIZE
    limits = EngineLimits(MAX_MODEL_LEN, IDS, num_blocks, BLOCK_SIZE, num_seqs, frozenset())
    scheduler = Scheduler(BlockPool(num_blocks, BLOCK_SIZE), num_seqs, 2048)
    batch = PersistentBatch(scheduler.columns, MAX_MODEL_LEN, BLOCK_SIZE, device)
    sampler = Sampler(VOCAB, frozenset(), device)
    runner = ModelRunner(InstantDecoder(), [], batch, sampler)
    for owner, name in (
        (scheduler, "schedule"),
        (runner, "run"),
        (batch, "build"),
        (sampler, "draw"),
    ):
        watch.over(owner, name)
    return Engine(limits, scheduler, runner, Grammars(Path(), VOCAB, frozenset()))

"""`penstock bench memory`: how much of the KV memory that is taken holds nothing.

Waste is 1 - live tokens / slots taken, over all steps of a trace. A block pool wastes about half a
block for each sequence, so 8 / mean length with blocks of 16. An allocator that gives each sequence
`max_model_len` slots in one piece wastes those that the sequence does not use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.schemas.params.sampling import SamplingParams
from penstock.schemas.process.start import Settings, load_settings
from penstock.worker.engine.cache.block_pool import BlockPool
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.grammar.constraints import Grammars
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.messages import AddSequence
from penstock.worker.engine.sampling.sampler import Sampled
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.sequences.sequence import Plan

NUM_JOBS = 500
MEAN_TOKENS = 600  # a whole sequence, prompt and completion
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 16
NUM_BLOCKS = 2048


@dataclass(frozen=True, slots=True)
class Waste:
    """The wasted shares of the slots taken, and the mean numbers of sequences that ran at once.

    They are taken over all steps, under a paged and a contiguous allocator.
    """

    paged_share: float
    contiguous_share: float
    paged_running: float
    contiguous_running: float
    mean_tokens: float


class InstantRunner:
    """A runner that answers at once, so that only scheduler and pool are measured."""

    def run(self, plan: Plan) -> Sampled:
        count = sum(piece.draws for piece in plan)
        return Sampled([0] * count, [None] * count)

    def zero(self, blocks: list[int]) -> None:
        """Do nothing, since there is no cache behind the blocks."""

    def copy(self, blocks: list[tuple[int, int]], rows: list[tuple[int, int]]) -> None:
        """Do nothing, for the same reason."""


class WasteSettings(Settings):
    """KV memory that is taken and holds nothing: blocks of 16 against one region a sequence."""


def main(argv: Sequence[str]) -> int:
    load_settings(WasteSettings, "penstock bench memory", argv)
    waste = measure()
    table = Table(
        title=f"KV memory, 500 sequences with a mean of {waste.mean_tokens:.0f} tokens",
        title_justify="left",
    )
    for column in ("allocator", "waste", "running at once, mean"):
        table.add_column(column, justify="right" if column != "allocator" else "left")
    table.add_row("blocks of 16", f"{waste.paged_share:.1%}", f"{waste.paged_running:.0f}")
    table.add_row(
        "contiguous, max_model_len each",
        f"{waste.contiguous_share:.1%}",
        f"{waste.contiguous_running:.0f}",
    )
    Console().print(table)
    return 0


def measure() -> Waste:
    """Replay one trace under both allocators, in the same memory."""
    trace = _trace()
    paged_share, paged_running = _replay(trace, max_num_seqs=256)
    rooms = NUM_BLOCKS * BLOCK_SIZE // MAX_MODEL_LEN
    contiguous_share, contiguous_running = _replay(trace, max_num_seqs=rooms, region=MAX_MODEL_LEN)
    mean = float(
        np.mean([len(addition.prompt) + (addition.params.max_tokens or 0) for addition in trace])
    )
    return Waste(paged_share, contiguous_share, paged_running, contiguous_running, mean)


def _trace() -> list[AddSequence]:
    rng = np.random.default_rng(0)
    sigma = 0.5
    lengths = np.exp(np.log(MEAN_TOKENS) - sigma**2 / 2 + sigma * rng.standard_normal(NUM_JOBS))
    trace = []
    for number, length in enumerate(np.clip(lengths, 64, MAX_MODEL_LEN).astype(int)):
        num_prompt = int(length * 0.6)
        prompt = rng.integers(1, 1000, num_prompt).tolist()
        params = SamplingParams(temperature=0, max_tokens=int(length) - num_prompt)
        trace.append(AddSequence(str(number), prompt, params))
    return trace


def _replay(
    trace: list[AddSequence], max_num_seqs: int, region: int | None = None
) -> tuple[float, float]:
    """Return the waste, and the mean number of running sequences.

    region  the slots that each sequence takes; None means those of its blocks
    """
    limits = EngineLimits(MAX_MODEL_LEN, 1000, NUM_BLOCKS, BLOCK_SIZE, max_num_seqs, frozenset())
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    scheduler = Scheduler(pool, max_num_seqs, max_num_batched_tokens=8192)
    engine = Engine(limits, scheduler, InstantRunner(), Grammars(Path(), 1000, frozenset()))
    for addition in trace:
        engine.add(addition)
    num_live = num_slots = running = steps = 0
    while engine.busy:
        engine.step()
        stats = engine.stats()
        num_live += stats.num_live_slots
        num_slots += stats.num_running * region if region else stats.num_held_blocks * BLOCK_SIZE
        running += stats.num_running
        steps += 1
    return 1 - num_live / num_slots, running / steps

"""The plan of one forward pass, which all its layers share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from penstock.kernels.attention.backends import Backend
from penstock.kernels.attention.paged_attention import Attend, plan_attention
from penstock.kernels.attention.spans import HeadShape, Span, Spans, read_spans
from penstock.kernels.cache.rotate_and_store import Places, Rotation, Store, plan_store
from penstock.kernels.cache.store_latents import StoreLatents, plan_latent_store
from penstock.worker.layers.arithmetic import Arithmetic
from penstock.worker.layers.batch import Batch
from penstock.worker.layers.products.product import Pass
from penstock.worker.layers.rotary import RotaryTable


@dataclass(frozen=True, slots=True)
class PassPlan(Pass):
    """A pass over the caches, and the work that its layers share; the first that asks computes it.

    rotations  the ways in which the pass's tokens are turned; a layer has the number of one
    """

    rotations: Sequence[Rotation]
    slot_mapping: Tensor
    spans: Spans
    backend: Backend = "auto"
    _stores: dict[tuple[HeadShape, int | None], Store] = field(default_factory=dict)
    _latent_stores: dict[int, StoreLatents] = field(default_factory=dict)
    _divisions: "dict[int, Divided]" = field(default_factory=dict)
    _attends: dict[tuple[HeadShape, int | None], Attend] = field(default_factory=dict)

    def store(self, shape: HeadShape, kv_cache: Tensor, table: int | None) -> Store:
        if (shape, table) not in self._stores:
            rotation = None if table is None else self.rotations[table]
            places = Places(rotation, self.slot_mapping)
            self._stores[shape, table] = plan_store(places, shape, kv_cache, self.backend)
        return self._stores[shape, table]

    def latent_store(self, table: int, kv_cache: Tensor) -> StoreLatents:
        if table not in self._latent_stores:
            self._latent_stores[table] = plan_latent_store(
                self.rotations[table], self.slot_mapping, kv_cache
            )
        return self._latent_stores[table]

    def divided(self, least: int) -> "Divided":
        """Return the pass divided into slices of `least` rows or more, and the others."""
        if least not in self._divisions:
            self._divisions[least] = _divide(self, least)
        return self._divisions[least]

    def attend(self, shape: HeadShape, kv_cache: Tensor, window: int | None) -> Attend:
        if (shape, window) not in self._attends:
            self._attends[shape, window] = plan_attention(
                self.spans, shape, kv_cache, window, self.deterministic, self.backend
            )
        return self._attends[shape, window]


@dataclass(frozen=True, slots=True)
class Divided:
    """A pass divided by the lengths of its slices.

    long   the slices of so many rows, or more
    rows   the rows of the others, which `short` is the plan of
    short  None where there are none
    """

    long: Sequence[Span]
    rows: Tensor
    short: PassPlan | None


def _divide(plan: PassPlan, least: int) -> Divided:
    slices, spans = read_spans(plan.spans, None), plan.spans
    device = spans.context_lens.device
    long = [span for span in slices if span.stop - span.start >= least]
    short = [span for span in slices if span.stop - span.start < least]
    rows = [row for span in short for row in range(span.start, span.stop)]
    of_rows = torch.tensor(rows, dtype=torch.int64, device=device)
    if not short:
        return Divided(long, of_rows, None)
    lengths = [span.stop - span.start for span in short]
    seqs = torch.tensor([span.seq for span in short], device=device)
    of_short = Spans(
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
        spans.context_lens[seqs],
        spans.block_tables[seqs],
        max(lengths),
        max(span.context for span in short),
    )
    slots = plan.slot_mapping[of_rows]
    short_plan = PassPlan(plan.deterministic, (), slots, of_short, plan.backend)
    return Divided(long, of_rows, short_plan)


def spans_of(batch: Batch) -> Spans:
    return Spans(
        batch.query_start,
        batch.context_lens,
        batch.block_tables,
        batch.max_query_len,
        batch.max_context_len,
    )


def plan_pass(batch: Batch, tables: Sequence[RotaryTable], arithmetic: Arithmetic) -> PassPlan:
    rotations = [table.rows(batch.positions, batch.max_context_len) for table in tables]
    return PassPlan(
        arithmetic.deterministic,
        rotations,
        batch.slot_mapping,
        spans_of(batch),
        arithmetic.attention,
    )

"""Decoding steps as CUDA graphs: a step's kernels are launched by one call.

A graph has a fixed number of rows and reads tensors that stay where they are. A step with fewer
rows fills the others up (padding) with rows that see no key and are not stored.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from penstock.worker.layers.batch import Batch
from penstock.worker.models.contract.served import Network

NO_SLOT = -1
_MOST_ROWS = 512
_TELL_EVERY_S = 2.0
_log = logging.getLogger("penstock.worker.engine")

# Takes a computation; returns what computes it again, and the tensor that it then writes.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows to capture: close together where few rows are as a rule."""
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, _MOST_ROWS + 1, 32)]
    most = min(max_num_seqs, _MOST_ROWS)
    return [*takewhile(lambda size: size < most, sizes), most]


class CudaCapture:
    """Captures CUDA graphs, which share their memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        compute()  # compiles kernels and makes libraries' handles, which a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = compute()
        return graph.replay, out


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: Batch
    replay: Callable[[], None]
    hidden: Tensor


class GraphedNetwork:
    """A network that replays a graph where each sequence computes one token."""

    def __init__(
        self,
        network: Network,
        kv_caches: list[Tensor],
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        capture: Capture,
    ) -> None:
        """Capture the graphs, the largest first, so that the others find its memory.

        max_num_seqs  the largest number of rows; graphs of very many are not made
        """
        self.network = network
        self._kv_caches = kv_caches
        self._sizes = graph_sizes(max_num_seqs)
        most, device = self._sizes[-1], kv_caches[0].device
        self._width = -(-max_model_len // block_size)
        self._inputs = Batch(
            token_ids=torch.zeros(most, dtype=torch.int64, device=device),
            positions=torch.zeros(most, dtype=torch.int64, device=device),
            slot_mapping=torch.full((most,), NO_SLOT, dtype=torch.int64, device=device),
            query_start=torch.arange(most + 1, dtype=torch.int32, device=device),
            context_lens=torch.zeros(most, dtype=torch.int32, device=device),
            block_tables=torch.zeros((most, self._width), dtype=torch.int32, device=device),
            max_query_len=1,
            max_context_len=max_model_len,
        )
        self._graphs = dict(self._captured(capture))

    def __call__(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        rows = len(batch.token_ids)
        # A step of one-token slices has as many rows as sequences.
        if batch.max_query_len > 1 or rows > self._sizes[-1] or kv_caches is not self._kv_caches:
            return self.network(batch, kv_caches)
        graph = self._graphs[self._sizes[bisect_left(self._sizes, rows)]]
        inputs = graph.inputs
        inputs.token_ids[:rows].copy_(batch.token_ids)
        inputs.positions[:rows].copy_(batch.positions)
        inputs.slot_mapping[:rows].copy_(batch.slot_mapping)
        inputs.slot_mapping[rows:].fill_(NO_SLOT)
        inputs.context_lens[:rows].copy_(batch.context_lens)
        inputs.context_lens[rows:].zero_()
        inputs.block_tables[:rows, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        graph.replay()
        return graph.hidden[:rows]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.network.logits(hidden)

    def _captured(self, capture: Capture) -> Iterator[tuple[int, _Graph]]:
        """Yield each size with its graph, and tell how far it is where that takes long."""
        began_s = told_s = time.monotonic()
        num, most = len(self._sizes), self._sizes[-1]
        for done, size in enumerate(reversed(self._sizes), 1):
            yield size, self._capture(size, capture)
            now_s = time.monotonic()
            if now_s - told_s >= _TELL_EVERY_S and done < num:
                _log.info("captured %d of %d graphs in %.0f s", done, num, now_s - began_s)
                told_s = now_s
        took_s = time.monotonic() - began_s
        _log.info("captured %d graphs of 1 to %d rows in %.1f s", num, most, took_s)

    @torch.inference_mode()
    def _capture(self, size: int, capture: Capture) -> _Graph:
        whole = self._inputs
        inputs = Batch(
            whole.token_ids[:size],
            whole.positions[:size],
            whole.slot_mapping[:size],
            whole.query_start[: size + 1],
            whole.context_lens[:size],
            whole.block_tables[:size],
            whole.max_query_len,
            whole.max_context_len,
        )
        replay, hidden = capture(lambda: self.network(inputs, self._kv_caches))
        return _Graph(inputs, replay, hidden)

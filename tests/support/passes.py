"""Forward passes of a decoder over a paged cache whose blocks are dealt at random."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.worker.layers.batch import Batch
from penstock.worker.models.contract.served import Model


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens start:stop of sequence `seq`."""

    seq: int
    start: int
    stop: int


class Passes:
    """Each pass computes some slices and remembers each row's logits.

    token_ids  the sequences
    kept       the type of keys and values; None means the model's
    """

    def __init__(
        self,
        decoder: Model,
        token_ids: list[list[int]],
        seed: int = 0,
        block_size: int = 16,
        kept: torch.dtype | None = None,
    ) -> None:
        config = decoder.config
        self.decoder = decoder
        self.token_ids = token_ids
        self.block_size = block_size
        self.logits: dict[tuple[int, int], Tensor] = {}
        needed = [-(-len(ids) // block_size) for ids in token_ids]
        num_blocks = sum(needed) + 5
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        self.tables = [part.tolist() for part in torch.split(order[: sum(needed)], needed)]
        self.kv_caches = [
            kv.zeros(num_blocks, block_size, kept or decoder.dtype, torch.device("cpu"))
            for kv in config.kv_shapes
        ]

    def whole(self) -> "Passes":
        """Every sequence in one pass."""
        self.run([Slice(seq, 0, len(ids)) for seq, ids in enumerate(self.token_ids)])
        return self

    def alone(self, seqs: Iterable[int]) -> "Passes":
        """Each sequence in a pass of its own."""
        for seq in seqs:
            self.run([Slice(seq, 0, len(self.token_ids[seq]))])
        return self

    def in_slices(self, length: int) -> "Passes":
        """All sequences together, so many tokens of each a pass."""
        for start in range(0, max(map(len, self.token_ids)), length):
            self.run(
                [
                    Slice(seq, start, min(start + length, len(ids)))
                    for seq, ids in enumerate(self.token_ids)
                    if start < len(ids)
                ]
            )
        return self

    def run(self, slices: list[Slice]) -> None:
        with torch.inference_mode():
            rows = self.decoder.logits(self.decoder(self.batch(slices), self.kv_caches)).clone()
        places = [(part.seq, at) for part in slices for at in range(part.start, part.stop)]
        self.logits.update(zip(places, rows, strict=True))

    def batch(self, slices: list[Slice]) -> Batch:
        places = [(part.seq, at) for part in slices for at in range(part.start, part.stop)]
        widest = max(len(self.tables[part.seq]) for part in slices)
        # Past a sequence's last block stand ids of no block.
        tables = [
            self.tables[part.seq] + [10**6] * (widest - len(self.tables[part.seq]))
            for part in slices
        ]
        lengths = [part.stop - part.start for part in slices]
        contexts = [part.stop for part in slices]
        return Batch(
            token_ids=torch.tensor([self.token_ids[seq][at] for seq, at in places]),
            positions=torch.tensor([at for _, at in places]),
            slot_mapping=torch.tensor([self.slot(seq, at) for seq, at in places]),
            query_start=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            max_query_len=max(lengths),
            max_context_len=max(contexts),
        )

    def slot(self, seq: int, at: int) -> int:
        return self.tables[seq][at // self.block_size] * self.block_size + at % self.block_size

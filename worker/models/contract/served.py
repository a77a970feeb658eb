"""The engine's view of a model, whoever computes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.worker.layers.batch import Batch
from penstock.worker.layers.eight_bit_cache import row_width


class KvShape(NamedTuple):
    """The shape of one layer's keys and values.

    parts  keys and values, or keys alone
    """

    num_kv_heads: int
    head_dim: int
    parts: int = 2

    def of_blocks(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
        """Return the shape of a cache, as `penstock.kernels.attention.paged_attention` has it."""
        width = row_width(self.head_dim, dtype)
        return num_blocks, self.num_kv_heads, self.parts, block_size, width

    def zeros(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a cache of zeros, made as bytes: not all operations of torch know all types."""
        *rows, size = self.of_blocks(num_blocks, block_size, dtype)
        cache = torch.zeros((*rows, size * dtype.itemsize), dtype=torch.uint8, device=device)
        return cache.view(dtype)

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token in such a cache, with the scales that stand there."""
        width = row_width(self.head_dim, dtype)
        return self.parts * self.num_kv_heads * width * dtype.itemsize


class ModelFacts(Protocol):
    """The facts of one model.

    family         the `model_type` of its configuration
    max_model_len  the number of tokens that the positions are made for
    kv_shapes      one for each layer that has a cache
    state_bytes    bytes that layers keep of a sequence beside it, whatever its length
    """

    @property
    def family(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]: ...

    @property
    def state_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The sizes of a model that is not loaded.

    shapes     its tensors' shapes, by name
    products   the names of those that have fewer bits where the others do not
    integers   the bits and the group of products that the files have so; None: they have none
    """

    facts: ModelFacts
    dtype: torch.dtype
    shapes: Mapping[str, tuple[int, ...]]
    products: frozenset[str]
    integers: tuple[int, int | None] | None = None


class States(Protocol):
    """The states of sequences, in rows; a batch's `slices` say whose state is in which."""

    def allocate(self, num_rows: int) -> None:
        """Take the memory of so many."""

    def copy(self, source: int, target: int) -> None:
        """Copy the state in one row to another."""


class Network(Protocol):
    """Token ids in, a hidden state for each out. Call under `torch.inference_mode`."""

    def __call__(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        """Return the hidden states [tokens, hidden_size] of the batch.

        kv_caches, one for each of `kv_shapes` and in `dtype`, gain the batch's KV.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [rows, vocab_size], of hidden [rows, hidden_size]."""


class Model(Network, Protocol):
    """A network, and what is to be known of it.

    is_capturable  whether a pass of one-token slices can be a CUDA graph: it never waits for the
                   device, and its operations depend on no number in the batch
    states         None where the layers keep nothing of a sequence but keys and values
    """

    @property
    def is_capturable(self) -> bool: ...

    @property
    def states(self) -> States | None: ...

    @property
    def config(self) -> ModelFacts: ...

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of hidden states and caches."""

    def prepare(self, max_model_len: int) -> None:
        """Make ready for sequences of so many tokens; none is longer."""

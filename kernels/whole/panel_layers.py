"""All layers of a decoder in one compiled call; `cpu/layers.c` has the order of the operations.

The result has the same bits as one operation after the other. The call saves eight calls from
Python in each layer, which for one sequence take a fifth of a small model's step.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.attention.backends import Backend
from penstock.kernels.attention.paged_attention_panels import (
    KINDS,
    PackedScoring,
    ops_on_panels,
    packed_scoring,
)
from penstock.kernels.attention.spans import HeadShape, Scoring, Spans
from penstock.kernels.cache.rotate_and_store import HeadNorms, Rotation
from penstock.kernels.linear.panel_weight import PackedWeight, PanelWeight
from penstock.kernels.rows.norm import NormWeights, PackedNorm, packed_norm


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of one layer: attention, then a feed-forward layer.

    Each of the two may have a norm before it and one after it, and is added to the residual.

    table        which of the pass's rotations turns queries and keys; None means none does
    is_parallel  both read the same rows; no norm stands after them
    """

    attention_in: NormWeights | None
    qkv: PanelWeight
    head_norms: HeadNorms | None
    table: int | None
    scoring: Scoring
    output: PanelWeight
    attention_out: NormWeights | None
    mlp_in: NormWeights | None
    gate_up: PanelWeight
    down: PanelWeight
    mlp_out: NormWeights | None
    is_parallel: bool = False


class PanelLayers:
    """All layers as one call, which overwrites hidden [tokens, hidden_size] bf16, contiguous."""

    def __init__(self, parts: list[LayerParts], shape: HeadShape) -> None:
        self._parts = parts  # kept, since the compiled call reads their memory
        self._shape = shape
        self._layers = (_Layer * len(parts))(*map(_layer, parts))
        widest = max(max(layer.qkv.out_features, layer.gate_up.out_features) for layer in parts)
        self._room = parts[0].qkv.in_features + 2 * shape.num_heads * shape.head_dim + widest

    def ops(self, kv_cache: Tensor, backend: Backend) -> ctypes.CDLL | None:
        """Return the compiled operations if they work on such a cache, else None."""
        return ops_on_panels(kv_cache, self._shape, backend)

    def __call__(
        self,
        ops: ctypes.CDLL,
        hidden: Tensor,
        kv_caches: list[Tensor],
        rotations: Sequence[Rotation],
        slot_mapping: Tensor,
        spans: Spans,
    ) -> Tensor:
        tables = spans.block_tables.contiguous()
        of_all = ctypes.c_void_p * len(rotations)
        batch = _Pass(
            of_all(*[rotation.cos.data_ptr() for rotation in rotations]),
            of_all(*[rotation.sin.data_ptr() for rotation in rotations]),
            slot_mapping.data_ptr(),
            spans.query_start.data_ptr(),
            spans.context_lens.data_ptr(),
            tables.data_ptr(),
            len(hidden),
            tables.shape[1],
            len(spans.context_lens),
            self._shape.num_heads,
            self._shape.num_kv_heads,
            self._shape.head_dim,
            kv_caches[0].shape[3],
            KINDS[kv_caches[0].dtype],
        )
        blocks = (ctypes.c_void_p * len(kv_caches))(
            *[kv_cache.data_ptr() for kv_cache in kv_caches]
        )
        rows = -(-len(hidden) // 16) * 16
        room = torch.empty(rows, self._room, dtype=torch.bfloat16)
        has_failed = ops.run_layers(
            self._layers,
            len(self._layers),
            ctypes.byref(batch),
            blocks,
            hidden.data_ptr(),
            room.data_ptr(),
        )
        if has_failed:
            raise MemoryError(f"the layers found no memory for {len(hidden)} rows")
        return hidden


class _Layer(ctypes.Structure):
    _fields_ = (
        *[(name, PackedWeight) for name in ("qkv", "output", "gate_up", "down")],
        *[
            (name, PackedNorm)
            for name in (
                *("attention_in", "attention_out", "mlp_in", "mlp_out"),
                *("query_norm", "key_norm"),
            )
        ],
        *[
            (name, ctypes.c_int)
            for name in ("norms_whole_rows", "is_parallel", "activation", "table")
        ],
        ("scoring", PackedScoring),
        *[(name, ctypes.c_float) for name in ("key_scale", "value_scale")],
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        *[(name, ctypes.POINTER(ctypes.c_void_p)) for name in ("cos", "sin")],
        *[(name, ctypes.c_void_p) for name in ("slots", "query_start", "context_lens", "tables")],
        *[
            (name, ctypes.c_int)
            for name in (
                *("tokens", "width", "seqs", "heads", "kv_heads", "head_dim", "block_size"),
                "kept",
            )
        ],
    )


def _layer(parts: LayerParts) -> _Layer:
    norms = parts.head_norms
    return _Layer(
        parts.qkv.layout,
        parts.output.layout,
        parts.gate_up.layout,
        parts.down.layout,
        packed_norm(parts.attention_in),
        packed_norm(parts.attention_out),
        packed_norm(parts.mlp_in),
        packed_norm(parts.mlp_out),
        packed_norm(norms.query if norms else None),
        packed_norm(norms.key if norms else None),
        norms is not None and norms.whole_rows,
        parts.is_parallel,
        parts.gate_up.activation,
        -1 if parts.table is None else parts.table,
        packed_scoring(parts.scoring),
        parts.scoring.scales.key,
        parts.scoring.scales.value,
    )

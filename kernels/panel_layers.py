"""All layers of a decoder in one compiled call; `cpu/layers.c` has the order of the operations.

The result has the same bits as one operation after the other. The call saves eight calls from
Python in each layer, which for one sequence take a fifth of a small model's step.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.paged_attention_panels import PackedScoring, ops_on_panels, packed_scoring
from penstock.kernels.panel_linear import PackedWeight, PanelLinear
from penstock.kernels.rotate_and_store import HeadNorms, Places
from penstock.kernels.spans import HeadShape, Scoring, Spans


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of one layer: attention, then a gated feed-forward layer.

    Each of the two has a norm before it, and is added to the residual after it.

    attention_norm, mlp_norm  [hidden_size] bf16
    """

    attention_norm: Tensor
    qkv: PanelLinear
    head_norms: HeadNorms | None
    output: PanelLinear
    mlp_norm: Tensor
    gate_up: PanelLinear
    down: PanelLinear
    eps: float
    scoring: Scoring


class PanelLayers:
    """All layers as one call, which overwrites hidden [tokens, hidden_size] bf16, contiguous."""

    def __init__(self, parts: list[LayerParts], shape: HeadShape) -> None:
        self._parts = parts  # kept, since the compiled call reads their memory
        self._shape = shape
        self._layers = (_Layer * len(parts))(*map(_layer, parts))
        widest = max(parts[0].qkv.out_features, parts[0].gate_up.out_features)
        self._room = parts[0].qkv.in_features + 2 * shape.num_heads * shape.head_dim + widest

    def ops(self, kv_cache: Tensor) -> ctypes.CDLL | None:
        """Return the compiled operations if they work on such a cache, else None."""
        return ops_on_panels(kv_cache, self._shape)

    def __call__(
        self,
        ops: ctypes.CDLL,
        hidden: Tensor,
        kv_caches: list[Tensor],
        places: Places,
        spans: Spans,
    ) -> Tensor:
        tables = spans.block_tables.contiguous()
        batch = _Pass(
            None if places.cos is None else places.cos.data_ptr(),
            None if places.sin is None else places.sin.data_ptr(),
            places.slot_mapping.data_ptr(),
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
        )
        blocks = (ctypes.c_void_p * len(kv_caches))(*[each.data_ptr() for each in kv_caches])
        rows = -(-len(hidden) // 16) * 16
        room = torch.empty(rows, self._room, dtype=torch.bfloat16)
        failed = ops.run_layers(
            self._layers,
            len(self._layers),
            ctypes.byref(batch),
            blocks,
            hidden.data_ptr(),
            room.data_ptr(),
        )
        if failed:
            raise MemoryError(f"the layers found no memory for {len(hidden)} rows")
        return hidden


class _Layer(ctypes.Structure):
    _fields_ = (
        *[(name, PackedWeight) for name in ("qkv", "output", "gate_up", "down")],
        *[
            (name, ctypes.c_void_p)
            for name in ("attention_norm", "query_norm", "key_norm", "mlp_norm")
        ],
        *[(name, ctypes.c_float) for name in ("norm_eps", "head_norm_eps")],
        ("scoring", PackedScoring),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        *[
            (name, ctypes.c_void_p)
            for name in ("cos", "sin", "slots", "query_start", "context_lens", "tables")
        ],
        *[
            (name, ctypes.c_int)
            for name in ("tokens", "width", "seqs", "heads", "kv_heads", "head_dim", "block_size")
        ],
    )


def _layer(parts: LayerParts) -> _Layer:
    norms = parts.head_norms
    return _Layer(
        parts.qkv.packed,
        parts.output.packed,
        parts.gate_up.packed,
        parts.down.packed,
        parts.attention_norm.data_ptr(),
        norms.query.data_ptr() if norms else None,
        norms.key.data_ptr() if norms else None,
        parts.mlp_norm.data_ptr(),
        parts.eps,
        norms.eps if norms else 0.0,
        packed_scoring(parts.scoring),
    )

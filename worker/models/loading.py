"""Loads a decoder from a Hugging Face folder, tensor by tensor, so that memory holds it once."""

from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor

from penstock.worker.layers.arithmetic import AS_IT_IS, Arithmetic
from penstock.worker.layers.attention import Attention, HeadShape, Scoring
from penstock.worker.layers.decoder_layers import DecoderLayer, DecoderLayers
from penstock.worker.layers.embedding import Embedding, Head, embedding, tied
from penstock.worker.layers.linear import Linear, linear, unsupported
from penstock.worker.layers.mlp import GatedMLP
from penstock.worker.layers.norm import RMSNorm
from penstock.worker.layers.rotary import RotaryTable
from penstock.worker.models.config import NOTHING, ModelConfig, read_config
from penstock.worker.models.decoder import Decoder
from penstock.worker.models.errors import CannotQuantise, UnsupportedField
from penstock.worker.models.served import ModelPlan
from penstock.worker.models.spec import Dtype, LoadFormat, ModelSpec
from penstock.worker.models.weights import (
    DummyWeights,
    SafetensorsWeights,
    ShapesOfWeights,
    Weights,
)

_ROWS = "model.embed_tokens.weight"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_decoder(
    path: Path,
    dtype: Dtype = "auto",
    device: torch.device | str = "cpu",
    arithmetic: Arithmetic = AS_IT_IS,
    load_format: LoadFormat = "auto",
    overrides: Mapping[str, JsonValue] = NOTHING,
) -> Decoder:
    """Load the decoder of a Hugging Face folder. Raises a ModelError that says what is wrong.

    Quantised weights are made of bfloat16, and everything else is then computed in bfloat16.

    overrides  fields of config.json that replace the file's
    """
    config, place = read_config(path, overrides), torch.device(device)
    dtype = fitting_dtype(dtype, config, place, arithmetic)
    weights: Weights
    if load_format == "dummy":
        weights, stored = DummyWeights(config.initializer_range), torch.float32
    else:
        weights = SafetensorsWeights(path)
        stored = weights.dtype()
    computed = computed_dtype(dtype, config.dtype, stored)
    return _Loader(config, weights, computed, place, arithmetic).decoder()


def computed_dtype(asked: Dtype, told: torch.dtype | None, stored: torch.dtype) -> torch.dtype:
    """Return the type of weights and cache: the one asked for, the configuration's, or the files'.

    Raises UnsupportedField.
    """
    computed = _DTYPES.get(asked) or told or stored
    if computed not in _DTYPES.values():
        raise UnsupportedField("dtype", computed, f"{', '.join(_DTYPES)}; ask for one of them")
    return computed


def plan_decoder(spec: ModelSpec) -> ModelPlan:
    """Return what `load_decoder` would load; nothing is read but the configuration."""
    config, weights = read_config(spec.path, spec.overrides), ShapesOfWeights()
    asked = fitting_dtype(spec.dtype, config, spec.device, spec.arithmetic)
    stored = config.dtype or SafetensorsWeights(spec.path).dtype()
    computed = computed_dtype(asked, config.dtype, stored)
    _Loader(config, weights, torch.bfloat16, torch.device("meta"), AS_IT_IS).decoder()
    own = None if config.tie_word_embeddings else _ROWS  # a tied one has the head's numbers
    quantised = {name for name, shape in weights.shapes.items() if len(shape) > 1 and name != own}
    return ModelPlan(config, computed, weights.shapes, frozenset(quantised))


def fitting_dtype(
    asked: Dtype, config: ModelConfig, device: torch.device, arithmetic: Arithmetic
) -> Dtype:
    """Return the type that was asked for, or the one that quantised weights are computed in.

    Raises CannotQuantise where the model, the device or the type asked for is not for them.
    """
    if arithmetic.quantization is None:
        return asked
    if asked not in ("auto", "bfloat16"):
        raise CannotQuantise(
            f"{arithmetic.quantization} computes in bfloat16, and dtype is {asked}; "
            "leave one of the two out"
        )
    heads = config.num_heads * config.head_dim
    for width in (config.hidden_size, heads, config.intermediate_size):
        found = unsupported(width, device, arithmetic)
        if found is not None:
            raise CannotQuantise(found)
    return "bfloat16"


class _Loader:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        arithmetic: Arithmetic,
    ) -> None:
        self.config = config
        self.weights = weights
        self.dtype = dtype
        self.device = device
        self.arithmetic = arithmetic

    def decoder(self) -> Decoder:
        config = self.config
        rows, head = self._ends()
        layers = DecoderLayers([self._layer(index) for index in range(config.num_layers)])
        norm = self._norm("model.norm", config.hidden_size)
        self.weights.finish()
        frequencies = torch.tensor(config.rope.frequencies, device=self.device)
        table = RotaryTable(frequencies, config.rope.attention_factor, self.dtype)
        deterministic = self.arithmetic.deterministic
        return Decoder(config, self.dtype, rows, layers, norm, head, table, deterministic)

    def _ends(self) -> tuple[Embedding, Head]:
        """Return the embedding and the head, tied or not, by transformers' rule.

        They are tied if the configuration says so, and the files have only one of the two tensors,
        or both with equal numbers.
        """
        shape = self.config.vocab_size, self.config.hidden_size
        rows, head = _ROWS, "lm_head.weight"
        has_both = self.weights.has(rows) and self.weights.has(head)
        is_tied = self.config.tie_word_embeddings
        if is_tied and not has_both:
            weight = self._tensor(head if self.weights.has(head) else rows, *shape)
            return tied(weight, self.arithmetic.of_head())
        weight, own = self._tensor(rows, *shape), self._tensor(head, *shape)
        if is_tied and torch.equal(weight, own):
            return tied(weight, self.arithmetic.of_head())
        return embedding(weight), Head(linear(own, None, self.arithmetic.of_head()))

    def _layer(self, index: int) -> DecoderLayer:
        config, prefix = self.config, f"model.layers.{index}"
        heads = config.num_heads * config.head_dim
        kv_heads = config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        normed = config.qk_norm
        layer = DecoderLayer(
            self._norm(f"{prefix}.input_layernorm", config.hidden_size),
            self._linear(
                {
                    f"{attention}.q_proj": heads,
                    f"{attention}.k_proj": kv_heads,
                    f"{attention}.v_proj": kv_heads,
                },
                config.hidden_size,
                config.qkv_bias,
            ),
            Attention(
                HeadShape(config.num_heads, config.num_kv_heads, config.head_dim),
                Scoring(config.head_dim**-0.5, config.windows[index]),
                self._norm(f"{attention}.q_norm", config.head_dim) if normed else None,
                self._norm(f"{attention}.k_norm", config.head_dim) if normed else None,
            ),
            self._linear({f"{attention}.o_proj": config.hidden_size}, heads, config.output_bias),
            self._norm(f"{prefix}.post_attention_layernorm", config.hidden_size),
            GatedMLP(
                self._linear(
                    {
                        f"{mlp}.gate_proj": config.intermediate_size,
                        f"{mlp}.up_proj": config.intermediate_size,
                    },
                    config.hidden_size,
                    config.mlp_bias,
                    is_gated=True,
                ),
                self._linear(
                    {f"{mlp}.down_proj": config.hidden_size},
                    config.intermediate_size,
                    config.mlp_bias,
                ),
            ),
        )
        self.weights.release()
        return layer

    def _linear(
        self, parts: dict[str, int], in_features: int, biased: bool, is_gated: bool = False
    ) -> Linear:
        """Load several modules as one product. parts: module name -> number of its rows."""
        weight = self._empty(sum(parts.values()), in_features)
        for name, rows in zip(parts, torch.split(weight, list(parts.values())), strict=True):
            self.weights.fill(rows, f"{name}.weight")
        bias = self._empty(sum(parts.values())) if biased else None
        if bias is not None:
            for name, rows in zip(parts, torch.split(bias, list(parts.values())), strict=True):
                self.weights.fill(rows, f"{name}.bias")
        return linear(weight, bias, self.arithmetic, is_gated)

    def _norm(self, name: str, width: int) -> RMSNorm:
        return RMSNorm(self._tensor(f"{name}.weight", width), self.config.rms_norm_eps)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._empty(*shape)
        self.weights.fill(tensor, name)
        return tensor

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

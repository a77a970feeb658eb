"""Loads a decoder from a Hugging Face folder, tensor by tensor, so that memory holds it once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor

from penstock.worker.layers.arithmetic import AS_IT_IS, Arithmetic
from penstock.worker.layers.attention import Attention, HeadNorms, Scoring
from penstock.worker.layers.decoder_layers import DecoderLayer, DecoderLayers, Norms
from penstock.worker.layers.embedding import Embedding, Head, embedding, tied
from penstock.worker.layers.experts import Experts, Router
from penstock.worker.layers.linear import Activation, Linear, linear, num_parts, unsupported
from penstock.worker.layers.mlp import MLP
from penstock.worker.layers.norm import Norm, NormWeights
from penstock.worker.models.architecture import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MLPConfig,
)
from penstock.worker.models.config import NOTHING, ModelConfig, read_config
from penstock.worker.models.decoder import Decoder
from penstock.worker.models.errors import CannotQuantise, UnsupportedField
from penstock.worker.models.rope import Rope
from penstock.worker.models.served import ModelPlan
from penstock.worker.models.spec import Dtype, LoadFormat, ModelSpec
from penstock.worker.models.weights import (
    DummyWeights,
    SafetensorsWeights,
    ShapesOfWeights,
    Weights,
)

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
    whole = set() if config.tie_word_embeddings else {f"{config.decoder.embedding}.weight"}
    for index, layer in enumerate(config.decoder.layers):
        if isinstance(layer.mlp, ExpertsConfig):
            gates = (layer.mlp.router, layer.mlp.shared_gate)
            whole |= {f"{config.decoder.layer}.{index}.{each}.weight" for each in gates}
    matrices = {name for name, shape in weights.shapes.items() if len(shape) > 1}
    return ModelPlan(config, computed, weights.shapes, frozenset(matrices - whole))


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
    widths = {config.hidden_size}
    for layer in config.decoder.layers:
        shape, mlp = layer.attention.shape, layer.mlp
        widths |= {shape.num_heads * shape.head_dim}
        parts = (mlp,) if isinstance(mlp, MLPConfig) else (mlp.expert, mlp.shared)
        widths |= {each.intermediate_size for each in parts if each}
    for width in sorted(widths):
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
        config, parts = self.config, self.config.decoder
        rows, head = self._ends()
        ropes = list(
            dict.fromkeys(each.attention.rope for each in parts.layers if each.attention.rope)
        )
        layers = DecoderLayers(
            [
                self._layer(f"{parts.layer}.{index}", layer, ropes)
                for index, layer in enumerate(parts.layers)
            ]
        )
        norm = self._norm(parts.last_norm, config.hidden_size)
        self.weights.finish()
        return Decoder(
            config,
            self.dtype,
            rows,
            layers,
            norm,
            head,
            ropes,
            self.device,
            self.arithmetic.deterministic,
        )

    def _ends(self) -> tuple[Embedding, Head]:
        """Return the embedding and the head, tied or not, by transformers' rule.

        They are tied if the configuration says so, and the files have only one of the two tensors,
        or both with equal numbers.
        """
        shape, parts = (self.config.vocab_size, self.config.hidden_size), self.config.decoder
        rows, head = f"{parts.embedding}.weight", f"{parts.head}.weight"
        has_both = self.weights.has(rows) and self.weights.has(head)
        is_tied, of_head = self.config.tie_word_embeddings, self.arithmetic.of_head()
        factor = parts.logits_factor
        if is_tied and not has_both:
            weight = self._tensor(head if self.weights.has(head) else rows, *shape)
            return tied(weight, of_head, factor, parts.logits_softcap)
        weight, own = self._tensor(rows, *shape), self._tensor(head, *shape)
        if is_tied and torch.equal(weight, own):
            return tied(weight, of_head, factor, parts.logits_softcap)
        product = linear(own, None, of_head, factor=factor)
        return embedding(weight), Head(product, parts.logits_softcap)

    def _layer(self, name: str, layer: LayerConfig, ropes: list[Rope]) -> DecoderLayer:
        hidden_size, attention, norms = self.config.hidden_size, layer.attention, layer.norms
        made = DecoderLayer(
            Norms(
                self._norm_of_layer(name, norms.attention_in),
                self._norm_of_layer(name, norms.attention_out),
                self._norm_of_layer(name, norms.mlp_in),
                self._norm_of_layer(name, norms.mlp_out),
            ),
            self._qkv(name, attention),
            self._attention(name, attention, ropes),
            self._linear(
                {f"{name}.{attention.output}": hidden_size},
                attention.shape.num_heads * attention.shape.head_dim,
                attention.output_bias,
                factor=layer.residual_factor,
            ),
            self._mlp(name, layer.mlp, layer.residual_factor)
            if isinstance(layer.mlp, MLPConfig)
            else self._experts(name, layer.mlp, layer.residual_factor),
            layer.is_parallel,
        )
        self.weights.release()
        return made

    def _qkv(self, name: str, attention: AttentionConfig) -> Linear:
        shape = attention.shape
        rows = [each * shape.head_dim for each in (shape.num_heads, *(shape.num_kv_heads,) * 2)]
        turned = rows[0] + rows[1]
        rows = rows if len(attention.qkv) > 1 else [sum(rows)]
        order = None
        if attention.rope and attention.rope.order:
            order = torch.arange(sum(rows), device=self.device)
            heads = order[:turned].view(-1, shape.head_dim)
            heads.copy_(heads[:, list(attention.rope.order)])
        return self._linear(
            {f"{name}.{each}": count for each, count in zip(attention.qkv, rows, strict=True)},
            self.config.hidden_size,
            attention.qkv_bias,
            order=order,
        )

    def _attention(self, name: str, attention: AttentionConfig, ropes: list[Rope]) -> Attention:
        shape, rope, sinks, norms = attention.shape, attention.rope, None, None
        if attention.sinks:
            sinks = self._tensor(f"{name}.{attention.sinks}", shape.num_heads).float()
        if attention.head_norm:
            whole = attention.head_norm == "rows"
            widths = (shape.num_heads, shape.num_kv_heads) if whole else (1, 1)
            order = rope.order if rope else None
            query, key = (
                self._norm(f"{name}.self_attn.{each}_norm", width * shape.head_dim, order)
                for each, width in zip("qk", widths, strict=True)
            )
            norms = HeadNorms(query.weights, key.weights, whole)
        scoring = Scoring(attention.scale, attention.window, attention.softcap, sinks)
        return Attention(shape, scoring, norms, ropes.index(rope) if rope else None)

    def _mlp(self, name: str, mlp: MLPConfig, factor: float) -> MLP:
        width = mlp.intermediate_size
        rows = width * num_parts(mlp.activation) // len(mlp.up)
        up = self._linear(
            {f"{name}.{each}": rows for each in mlp.up},
            self.config.hidden_size,
            mlp.bias,
            activation=mlp.activation,
        )
        down = {f"{name}.{mlp.down}": self.config.hidden_size}
        return MLP(up, self._linear(down, width, mlp.bias, factor=factor))

    def _experts(self, name: str, mlp: ExpertsConfig, factor: float) -> Experts:
        num, expert = mlp.choice.num_experts, mlp.expert
        bias, shared, gate = None, None, None
        if mlp.router_bias:
            bias = torch.empty(num, device=self.device)  # float32, since small differences choose
            self.weights.fill(bias, f"{name}.{mlp.router_bias}")
        if mlp.shared:
            shared = self._mlp(name, mlp.shared, factor)
        if mlp.shared_gate:
            gate = self._router(f"{name}.{mlp.shared_gate}", 1)
        router = Router(self._router(f"{name}.{mlp.router}", num), mlp.choice, bias)
        numbered = (
            replace(
                expert,
                up=[each.format(number) for each in expert.up],
                down=expert.down.format(number),
            )
            for number in range(num)
        )
        return Experts(router, [self._mlp(name, each, factor) for each in numbered], shared, gate)

    def _router(self, name: str, rows: int) -> Linear:
        weight = self._tensor(f"{name}.weight", rows, self.config.hidden_size)
        return linear(weight, None, self.arithmetic.of_router())

    def _linear(
        self,
        parts: dict[str, int],
        in_features: int,
        biased: bool,
        *,
        activation: Activation | None = None,
        factor: float = 1.0,
        order: Tensor | None = None,
    ) -> Linear:
        """Load several modules as one product.

        parts  module name -> number of its rows
        order  of all rows, which the product has otherwise than the files
        """
        weight = self._stacked(parts, "weight", in_features)
        bias = self._stacked(parts, "bias") if biased else None
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        return linear(weight, bias, self.arithmetic, activation, factor)

    def _stacked(self, parts: dict[str, int], kind: str, *width: int) -> Tensor:
        tensor = self._empty(sum(parts.values()), *width)
        for name, rows in zip(parts, torch.split(tensor, list(parts.values())), strict=True):
            self.weights.fill(rows, f"{name}.{kind}")
        return tensor

    def _norm_of_layer(self, layer: str, name: str | None) -> Norm | None:
        return self._norm(f"{layer}.{name}", self.config.hidden_size) if name else None

    def _norm(self, name: str, width: int, order: Sequence[int] | None = None) -> Norm:
        """Load a norm. Its weights are wide where compiled code or sums want them so.

        order  of the weights of each head, which the norm has otherwise than the files
        """
        kind = self.config.decoder.norm
        wide = self.device.type == "cpu" or kind.adds_one
        weight = self._tensor(f"{name}.weight", width).to(torch.float32 if wide else self.dtype)
        if kind.adds_one:
            weight += 1.0
        if order:
            weight = weight.view(-1, len(order))[:, list(order)].flatten()
        bias = self._tensor(f"{name}.bias", width).to(weight.dtype) if kind.has_bias else None
        return Norm(NormWeights(weight, kind.eps, bias, kind.centers))

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._empty(*shape)
        self.weights.fill(tensor, name)
        return tensor

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

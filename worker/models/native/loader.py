"""Builds a decoder's layers of tensors, one by one, so that memory holds each once."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.worker.layers.arithmetic import Arithmetic
from penstock.worker.layers.attention import (
    NO_SCALES,
    Attention,
    HeadNorms,
    KvScales,
    Scoring,
)
from penstock.worker.layers.decoder_layers import DecoderLayer, DecoderLayers, Norms
from penstock.worker.layers.embedding import Embedding, Head, tied
from penstock.worker.layers.experts import Experts, Router
from penstock.worker.layers.latent_attention import HeadLinear, LatentAttention, LatentWeights
from penstock.worker.layers.linear import Activation, Linear, Weight, linear, num_parts
from penstock.worker.layers.mlp import MLP
from penstock.worker.layers.norm import Norm, NormWeights
from penstock.worker.models.families.architecture import (
    AttentionConfig,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    MLPConfig,
)
from penstock.worker.models.families.rope import Rope
from penstock.worker.models.folder.errors import CannotKeep
from penstock.worker.models.folder.weights import Weights
from penstock.worker.models.native.config import ModelConfig
from penstock.worker.models.native.decoder import Decoder

_TELL_EVERY_S = 2.0
_log = logging.getLogger("penstock.worker.models")


def _in_order(heads: int, size: int, order: Sequence[int] | None) -> Tensor:
    """Return the rows of heads of `size` rows each, the last ones of each in the given order."""
    rows = torch.arange(heads * size).view(heads, size)
    if order:
        rows[:, -len(order) :] = rows[:, -len(order) :][:, list(order)]
    return rows.flatten()


class Loader:
    """Builds a decoder. Its weights are asked for each tensor once."""

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
            dict.fromkeys(layer.attention.rope for layer in parts.layers if layer.attention.rope)
        )
        layers = DecoderLayers(list(self._layers(ropes)))
        norm = self._norm(parts.last_norm, config.hidden_size)
        first = len(parts.layers)
        unread = range(first, first + parts.unread_layers)
        self.weights.finish(["mtp.", *(f"{parts.layer}.{number}." for number in unread)])
        return Decoder(
            config,
            self.dtype,
            rows,
            layers,
            norm,
            head,
            ropes,
            self.device,
            self.arithmetic,
        )

    def _layers(self, ropes: list[Rope]) -> Iterator[DecoderLayer]:
        """Yield the layers, and tell how far it is where that takes long."""
        parts, began_s = self.config.decoder, time.monotonic()
        told_s, num = began_s, len(parts.layers)
        for number, layer in enumerate(parts.layers):
            yield self._layer(f"{parts.layer}.{number}", layer, ropes)
            now_s, done = time.monotonic(), number + 1
            if now_s - told_s >= _TELL_EVERY_S:
                left_s = (now_s - began_s) / done * (num - done)
                _log.info("loaded %d of %d layers, some %.0f s are left", done, num, left_s)
                told_s = now_s

    def _ends(self) -> tuple[Embedding, Head]:
        """Return the embedding and the head, tied or not, by transformers' rule.

        They are tied if the configuration says so, and the files have only one of the two tensors,
        or both with equal numbers.
        """
        parts, factor = self.config.decoder, self.config.decoder.logits_factor
        has_both = all(self.weights.has(f"{name}.weight") for name in (parts.embedding, parts.head))
        is_tied, of_head = self.config.tie_word_embeddings, self.arithmetic.of_head()
        if is_tied and not has_both:
            name = parts.head if self.weights.has(f"{parts.head}.weight") else parts.embedding
            return tied(self._end(name), of_head, factor, parts.logits_softcap)
        weight, own = self._end(parts.embedding), self._end(parts.head)
        if is_tied and torch.equal(weight.rows(slice(None)), own.rows(slice(None))):
            return tied(weight, of_head, factor, parts.logits_softcap)
        product = linear(own, None, of_head, factor=factor)
        return weight.rows, Head(product, parts.logits_softcap)

    def _end(self, name: str) -> Weight:
        return self._weight({name: self.config.vocab_size}, self.config.hidden_size)

    def _layer(self, name: str, layer: LayerConfig, ropes: list[Rope]) -> DecoderLayer:
        attention, norms = layer.attention, layer.norms
        decoder_layer = DecoderLayer(
            Norms(
                self._norm_of_layer(name, norms.attention_in),
                self._norm_of_layer(name, norms.attention_out),
                self._norm_of_layer(name, norms.mlp_in),
                self._norm_of_layer(name, norms.mlp_out),
            ),
            self._attention(name, attention, ropes)
            if isinstance(attention, AttentionConfig)
            else self._latent_attention(name, attention, ropes),
            self._output(name, attention, layer.residual_factor),
            self._mlp(name, layer.mlp, layer.residual_factor)
            if isinstance(layer.mlp, MLPConfig)
            else self._experts(name, layer.mlp, layer.residual_factor),
            layer.is_parallel,
        )
        self.weights.release()
        return decoder_layer

    def _qkv(self, name: str, attention: AttentionConfig) -> Linear:
        shape = attention.shape
        rows = shape.rows if len(attention.qkv) > 1 else [sum(shape.rows)]
        order = None
        if attention.rope and attention.rope.order:
            heads = shape.num_heads + shape.num_kv_heads
            in_heads = _in_order(heads, shape.head_dim, attention.rope.order)
            order = torch.cat((in_heads, torch.arange(len(in_heads), sum(rows))))
        return self._linear(
            {f"{name}.{module}": count for module, count in zip(attention.qkv, rows, strict=True)},
            self.config.hidden_size,
            attention.qkv_bias,
            order=order,
        )

    def _attention(self, name: str, attention: AttentionConfig, ropes: list[Rope]) -> Attention:
        shape, rope, norms = attention.shape, attention.rope, None
        if attention.head_norm:
            whole = attention.head_norm == "rows"
            widths = (shape.num_heads, shape.num_kv_heads) if whole else (1, 1)
            order = rope.order if rope else None
            query, key = (
                self._norm(f"{name}.self_attn.{letter}_norm", width * shape.head_dim, order)
                for letter, width in zip("qk", widths, strict=True)
            )
            norms = HeadNorms(query.weights, key.weights, whole)
        sinks = None
        if attention.sinks:
            sinks = self._wide(f"{name}.{attention.sinks}", shape.num_heads)
        module, _, _ = f"{name}.{attention.output}".rpartition(".")
        scales = self._kv_scales(module)
        scoring = Scoring(attention.scale, attention.window, attention.softcap, sinks, scales)
        table = ropes.index(rope) if rope else None
        return Attention(self._qkv(name, attention), shape, scoring, norms, table)

    def _kv_scales(self, module: str) -> KvScales:
        """Return an attention's scales where a cache has numbers that they are for."""
        is_fp8 = self.arithmetic.kv_cache.startswith("fp8")
        return self.weights.kv_scales(module) if is_fp8 else NO_SCALES

    def _latent_attention(
        self, name: str, config: LatentConfig, ropes: list[Rope]
    ) -> LatentAttention:
        name, heads = f"{name}.self_attn", config.num_heads
        if self._kv_scales(name) != NO_SCALES:
            raise CannotKeep(f"fp8: {name} has scales, and latents are kept without; leave it out")
        rank, rope_dim = config.rank, config.rope_dim
        query_rank, of_head = config.query_rank, config.still + rope_dim
        in_heads = _in_order(heads, of_head, config.rope.order)
        query = f"{name}.q_a_proj" if query_rank else f"{name}.q_proj"
        of_query = torch.arange(query_rank) if query_rank else in_heads
        of_keys = len(of_query) + _in_order(1, rank + rope_dim, config.rope.order)
        first = self._linear(
            {query: len(of_query), f"{name}.kv_a_proj_with_mqa": rank + rope_dim},
            self.config.hidden_size,
            config.bias,
            order=torch.cat((of_query, of_keys)),
            bare_module=f"{name}.q_proj",
        )
        norm, product = None, None
        if query_rank:
            norm = self._norm(f"{name}.q_a_layernorm", query_rank, eps=config.norm_eps)
            rows = {f"{name}.q_b_proj": len(in_heads)}
            product = self._linear(rows, query_rank, False, order=in_heads)
        width = heads * (config.still + config.value_dim)
        up = self._weight({f"{name}.kv_b_proj": width}, rank).rows(slice(None))
        key, value = up.view(heads, -1, rank).tensor_split((config.still,), 1)
        weights = LatentWeights(
            first,
            norm,
            product,
            self._norm(f"{name}.kv_a_layernorm", rank, eps=config.norm_eps),
            HeadLinear(key.contiguous()),
            HeadLinear(value.transpose(1, 2).contiguous()),
        )
        scoring, table = Scoring(config.scale), ropes.index(config.rope)
        return LatentAttention(weights, config.shape, rope_dim, scoring, table)

    def _output(
        self, name: str, attention: AttentionConfig | LatentConfig, factor: float
    ) -> Linear:
        if isinstance(attention, AttentionConfig):
            width = attention.shape.num_heads * attention.shape.head_dim
            module, has_bias = attention.output, attention.output_bias
        else:
            width = attention.num_heads * attention.value_dim
            module, has_bias = "self_attn.o_proj", attention.bias
        rows = {f"{name}.{module}": self.config.hidden_size}
        return self._linear(rows, width, has_bias, factor=factor)

    def _mlp(self, name: str, mlp: MLPConfig, factor: float) -> MLP:
        width = mlp.intermediate_size
        rows = width * num_parts(mlp.activation) // len(mlp.up)
        up = self._linear(
            {f"{name}.{module}": rows for module in mlp.up},
            self.config.hidden_size,
            mlp.bias,
            activation=mlp.activation,
            order=torch.arange(rows).view(-1, 2).t().flatten() if mlp.interleaved else None,
        )
        down = {f"{name}.{mlp.down}": self.config.hidden_size}
        return MLP(up, self._linear(down, width, mlp.bias, factor=factor))

    def _experts(self, name: str, mlp: ExpertsConfig, factor: float) -> Experts:
        num, expert = mlp.choice.num_experts, mlp.expert
        bias, shared_mlp, gate = None, None, None
        if mlp.choice_bias:
            bias = self._wide(f"{name}.{mlp.choice_bias}", num)
        if mlp.shared_mlp:
            shared_mlp = self._mlp(name, mlp.shared_mlp, factor)
        if mlp.shared_gate:
            gate = self._router(f"{name}.{mlp.shared_gate}", 1)
        product = self._router(f"{name}.{mlp.router}", num, mlp.router_bias)
        router = Router(product, mlp.choice, bias)
        configs = (
            replace(
                expert,
                up=[module.format(number) for module in expert.up],
                down=expert.down.format(number),
            )
            for number in range(num)
        )
        return Experts(
            router, [self._mlp(name, config, factor) for config in configs], shared_mlp, gate
        )

    def _router(self, name: str, rows: int, has_bias: bool = False) -> Linear:
        weight = self._weight({name: rows}, self.config.hidden_size)
        bias = self._bias({name: rows}) if has_bias else None
        return linear(weight, bias, self.arithmetic.of_router())

    def _linear(
        self,
        parts: dict[str, int],
        in_features: int,
        has_bias: bool,
        *,
        activation: Activation | None = None,
        factor: float = 1.0,
        order: Tensor | None = None,
        bare_module: str = "",
    ) -> Linear:
        """Load several modules as one product.

        parts        module name -> number of its rows
        order        how the product orders all rows, where the files have another order
        bare_module  a module that has no bias where others have
        """
        weight = self._weight(parts, in_features)
        bias = self._bias(parts, bare_module) if has_bias else None
        if order is not None:
            order = order.to(self.device)
            weight, bias = weight[order], None if bias is None else bias[order]
        return linear(weight, bias, self.arithmetic, activation, factor)

    def _weight(self, parts: Mapping[str, int], in_features: int) -> Weight:
        return self.weights.product(parts, in_features, self.dtype, self.device)

    def _bias(self, parts: Mapping[str, int], bare_module: str = "") -> Tensor:
        bias = self._empty(sum(parts.values()))
        for name, rows in zip(parts, torch.split(bias, list(parts.values())), strict=True):
            if name == bare_module:
                rows.zero_()
            else:
                self.weights.fill(rows, f"{name}.bias")
        return bias

    def _norm_of_layer(self, layer: str, name: str | None) -> Norm | None:
        return self._norm(f"{layer}.{name}", self.config.hidden_size) if name else None

    def _norm(
        self,
        name: str,
        width: int,
        order: Sequence[int] | None = None,
        eps: float | None = None,
    ) -> Norm:
        """Load a norm. Its weights are wide where compiled code or sums want them so.

        order  how the norm orders each head's weights, where the files have another order
        """
        kind = self.config.decoder.norm
        wide = self.device.type == "cpu" or kind.adds_one
        weight = self._tensor(f"{name}.weight", width).to(torch.float32 if wide else self.dtype)
        if kind.adds_one:
            weight += 1.0
        if order:
            weight = weight.view(-1, len(order))[:, list(order)].flatten()
        bias = self._tensor(f"{name}.bias", width).to(weight.dtype) if kind.has_bias else None
        return Norm(NormWeights(weight, eps or kind.eps, bias, kind.centers))

    def _wide(self, name: str, size: int) -> Tensor:
        """Load numbers that stay in float32, since small differences count."""
        numbers = torch.empty(size, device=self.device)
        self.weights.fill(numbers, name)
        return numbers

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._empty(*shape)
        self.weights.fill(tensor, name)
        return tensor

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

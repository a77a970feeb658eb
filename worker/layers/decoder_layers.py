"""The layers of a decoder: attention and a feed-forward layer, with norms before or after them."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.whole.panel_layers import LayerParts, PanelLayers
from penstock.worker.layers.attention import Attention
from penstock.worker.layers.experts import Experts
from penstock.worker.layers.forward_pass import PassPlan
from penstock.worker.layers.latent_attention import LatentAttention
from penstock.worker.layers.linear import Linear
from penstock.worker.layers.mlp import MLP
from penstock.worker.layers.norm import Norm, NormWeights
from penstock.worker.layers.products.product import Pass


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of one layer; None means that there is none."""

    attention_in: Norm | None
    attention_out: Norm | None
    mlp_in: Norm | None
    mlp_out: Norm | None


class DecoderLayer:
    """One layer: attention, then the feed-forward layer, each added to the residual.

    is_parallel  both read the same rows; no norm stands after them
    """

    def __init__(
        self,
        norms: Norms,
        attention: Attention | LatentAttention,
        output: Linear,
        mlp: MLP | Experts,
        is_parallel: bool,
    ) -> None:
        self.norms = norms
        self.attention = attention
        self.output = output
        self.mlp = mlp
        self.is_parallel = is_parallel

    def __call__(self, hidden: Tensor, kv_cache: Tensor, plan: PassPlan) -> Tensor:
        """Compute the layer: hidden [tokens, hidden_size], overwritten -> the same shape."""
        norms = self.norms
        rows = norms.attention_in(hidden) if norms.attention_in else hidden
        out = self.attention(rows, kv_cache, plan)
        hidden = _added(self.output, out, norms.attention_out, hidden, plan)
        if not self.is_parallel:
            rows = norms.mlp_in(hidden) if norms.mlp_in else hidden
        return _added(self.mlp, rows, norms.mlp_out, hidden, plan)

    def parts(self) -> LayerParts | None:
        """Return the layer's parts for a compiled call; None if such a call cannot compute all."""
        attention, norms = self.attention, self.norms
        if not isinstance(self.mlp, MLP) or not isinstance(attention, Attention):
            return None
        products = attention.qkv, self.output, self.mlp.up, self.mlp.down
        panels = [product.panels for product in products if product.panels is not None]
        if len(panels) < len(products):
            return None
        qkv, output, up, down = panels
        return LayerParts(
            _weights(norms.attention_in),
            qkv,
            attention.norms,
            attention.table,
            attention.scoring,
            output,
            _weights(norms.attention_out),
            _weights(norms.mlp_in),
            up,
            down,
            _weights(norms.mlp_out),
            self.is_parallel,
        )


def _weights(norm: Norm | None) -> NormWeights | None:
    return norm.weights if norm else None


def _added(
    module: Linear | MLP | Experts, x: Tensor, norm: Norm | None, hidden: Tensor, pass_: Pass
) -> Tensor:
    return norm.add(module(x, pass_), hidden) if norm else module.add(x, hidden, pass_)


class DecoderLayers:
    """All layers, run one after the other, or in one compiled call where it can compute them."""

    def __init__(self, layers: list[DecoderLayer]) -> None:
        self._layers = layers
        self._together = _together(layers)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def are_capturable(self) -> bool:
        """Return whether no layer waits for the host."""
        return all(isinstance(layer.mlp, MLP) or layer.mlp.is_capturable for layer in self._layers)

    def __call__(self, hidden: Tensor, kv_caches: list[Tensor], plan: PassPlan) -> Tensor:
        """Compute all layers: hidden [tokens, hidden_size], overwritten -> the same shape."""
        if self._together is not None:
            ops = self._together.ops(kv_caches[0], plan.backend)
            if ops is not None:
                rotations, slots = plan.rotations, plan.slot_mapping
                return self._together(ops, hidden, kv_caches, rotations, slots, plan.spans)
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            hidden = layer(hidden, kv_cache, plan)
        return hidden


def _together(layers: list[DecoderLayer]) -> PanelLayers | None:
    parts = [layer_parts for layer in layers if (layer_parts := layer.parts()) is not None]
    shapes = {layer.attention.shape for layer in layers}
    return (
        PanelLayers(parts, shapes.pop()) if len(parts) == len(layers) and len(shapes) == 1 else None
    )

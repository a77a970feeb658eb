"""The layers of a decoder: Llama's layers, with the differences of other families as data."""

from torch import Tensor

from penstock.kernels.panel_layers import LayerParts, PanelLayers
from penstock.kernels.panel_linear import PanelLinear
from penstock.worker.layers.attention import Attention, PassPlan
from penstock.worker.layers.linear import Linear
from penstock.worker.layers.mlp import GatedMLP
from penstock.worker.layers.norm import RMSNorm


class DecoderLayer:
    """One layer: attention, then the feed-forward layer, each added to the residual."""

    def __init__(
        self,
        attention_norm: RMSNorm,
        qkv: Linear,
        attention: Attention,
        output: Linear,
        mlp_norm: RMSNorm,
        mlp: GatedMLP,
    ) -> None:
        self.attention_norm = attention_norm
        self.qkv = qkv
        self.attention = attention
        self.output = output
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, hidden: Tensor, kv_cache: Tensor, plan: PassPlan) -> Tensor:
        """Compute the layer: hidden [tokens, hidden_size], overwritten -> the same shape."""
        attended = self.attention(self.qkv(self.attention_norm(hidden)), kv_cache, plan)
        hidden = self.output.add(attended, hidden)
        return self.mlp.add(self.mlp_norm(hidden), hidden)

    def parts(self) -> LayerParts | None:
        """Return the layer's parts for a compiled call; None if such a call cannot compute all."""
        qkv, output, gate_up, down = self.qkv, self.output, self.mlp.gate_up, self.mlp.down
        if (
            isinstance(qkv, PanelLinear)
            and isinstance(output, PanelLinear)
            and isinstance(gate_up, PanelLinear)
            and isinstance(down, PanelLinear)
        ):
            return LayerParts(
                self.attention_norm.weight,
                qkv,
                self.attention.norms,
                output,
                self.mlp_norm.weight,
                gate_up,
                down,
                self.mlp_norm.eps,
                self.attention.scoring,
            )
        return None


class DecoderLayers:
    """All layers, run one after the other, or in one compiled call where it can compute them."""

    def __init__(self, layers: list[DecoderLayer]) -> None:
        self._layers = layers
        self.shape = layers[0].attention.shape
        self._together = _together(layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __call__(self, hidden: Tensor, kv_caches: list[Tensor], plan: PassPlan) -> Tensor:
        """Compute all layers: hidden [tokens, hidden_size], overwritten -> the same shape."""
        if self._together is not None:
            ops = self._together.ops(kv_caches[0])
            if ops is not None:
                return self._together(ops, hidden, kv_caches, plan.places, plan.spans)
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            hidden = layer(hidden, kv_cache, plan)
        return hidden


def _together(layers: list[DecoderLayer]) -> PanelLayers | None:
    parts = [known for layer in layers if (known := layer.parts()) is not None]
    return PanelLayers(parts, layers[0].attention.shape) if len(parts) == len(layers) else None

"""From a Hugging Face folder to a decoder, tensor by tensor, so that the model is held once."""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from worker.layers.arithmetic import AS_IT_IS, Arithmetic
from worker.layers.attention import Attention
from worker.layers.decoder_layers import DecoderLayer, DecoderLayers
from worker.layers.embedding import Embedding, Head, embedding, tied
from worker.layers.linear import Linear, linear, obstacle
from worker.layers.mlp import GatedMLP
from worker.layers.norm import RMSNorm
from worker.layers.rotary import rotary_table
from worker.models.config import ModelConfig, read_config
from worker.models.decoder import Decoder
from worker.models.errors import CannotQuantise
from worker.models.weights import DummyWeights, SafetensorsWeights, Weights

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "dummy"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_decoder(
    path: Path,
    dtype: Dtype = "auto",
    device: torch.device | str = "cpu",
    arithmetic: Arithmetic = AS_IT_IS,
    load_format: LoadFormat = "auto",
) -> Decoder:
    """Quantised weights are made of bfloat16, and everything else is computed in it."""
    if arithmetic.quantization is not None:
        if dtype not in ("auto", "bfloat16"):
            raise CannotQuantise(
                f"{arithmetic.quantization} computes in bfloat16, and dtype is {dtype}; "
                "leave one of the two out"
            )
        dtype = "bfloat16"
    config, place = read_config(path), torch.device(device)
    _refuse_widths(config, place, arithmetic)
    if load_format == "dummy":
        loader = _Loader(
            config,
            DummyWeights(config.initializer_range),
            _DTYPES.get(dtype) or config.dtype or torch.float32,
            place,
            arithmetic,
        )
    else:
        weights = SafetensorsWeights(path)
        loader = _Loader(
            config,
            weights,
            _DTYPES.get(dtype) or config.dtype or weights.dtype(),
            place,
            arithmetic,
        )
    return loader.decoder()


def _refuse_widths(config: ModelConfig, device: torch.device, arithmetic: Arithmetic) -> None:
    heads = config.num_heads * config.head_dim
    for width in (config.hidden_size, heads, config.intermediate_size):
        found = obstacle(width, device, arithmetic)
        if found is not None:
            raise CannotQuantise(found)


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
        # A file may repeat a tied head.
        self.weights.finish({"lm_head.weight"} if config.tie_word_embeddings else set())
        frequencies = torch.tensor(config.rope.frequencies, device=self.device)
        table = rotary_table(
            frequencies, config.rope.attention_factor, config.max_position_embeddings, self.dtype
        )
        deterministic = self.arithmetic.deterministic
        return Decoder(config, self.dtype, rows, layers, norm, head, table, deterministic)

    def _ends(self) -> tuple[Embedding, Head]:
        config = self.config
        shape = config.vocab_size, config.hidden_size
        weight = self._tensor("model.embed_tokens.weight", *shape)
        if config.tie_word_embeddings:
            return tied(weight, self.arithmetic.of_head())
        head = self._tensor("lm_head.weight", *shape)
        return embedding(weight), Head(linear(head, None, self.arithmetic.of_head()))

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
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                config.windows[index],
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
        """parts: module name -> its rows; they become one product."""
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

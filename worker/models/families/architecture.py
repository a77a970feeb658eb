"""The parts of a decoder, as a family describes them. Defaults are Llama's.

Names are those of modules in a checkpoint; what reads a tensor adds ".weight" or ".bias".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.worker.layers.attention import HeadShape
from penstock.worker.layers.experts import ExpertChoice
from penstock.worker.layers.linear import Activation
from penstock.worker.models.families.rope import Rope


@dataclass(frozen=True, slots=True)
class NormConfig:
    """The kind of all norms: by the root of the mean square, or of the variance.

    centers   the mean is taken away first (LayerNorm)
    has_bias  a bias is added
    adds_one  checkpoints have the weights less one
    """

    eps: float
    centers: bool = False
    has_bias: bool = False
    adds_one: bool = False


@dataclass(frozen=True, slots=True)
class NormNames:
    """The norms before and after each of a layer's two parts; None means that there is none."""

    attention_in: str | None = "input_layernorm"
    attention_out: str | None = None
    mlp_in: str | None = "post_attention_layernorm"
    mlp_out: str | None = None


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The attention of one layer.

    rope       None where queries and keys are not turned
    window     the number of keys that a query sees; None means all
    sinks      the tensor of a score more for each head, without a value
    qkv        one module for each of queries, keys and values, or one for all
    head_norm  queries and keys are normalised: each head, or all heads as one row
    """

    shape: HeadShape
    scale: float
    rope: Rope | None
    window: int | None = None
    softcap: float | None = None
    sinks: str | None = None
    qkv: Sequence[str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_bias: bool = False
    head_norm: Literal["heads", "rows"] | None = None
    output: str = "self_attn.o_proj"
    output_bias: bool = False


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention. Sizes are numbers a head, or a token; names are DeepSeek's.

    query_rank  the size that queries are compressed to; None where they are not
    still       the part of a query or key that is not turned
    """

    num_heads: int
    rank: int
    query_rank: int | None
    still: int
    rope_dim: int
    value_dim: int
    scale: float
    rope: Rope
    bias: bool = False
    norm_eps: float = 1e-6  # eps of the norms inside, whatever the others have

    @property
    def shape(self) -> HeadShape:
        return HeadShape(self.num_heads, 1, self.rank + self.rope_dim, self.rank)


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """A feed-forward layer.

    up           gate and up, or one module for both, or for the one that is there
    interleaved  the rows of gate and up take turns in the one module
    """

    intermediate_size: int
    activation: Activation
    up: Sequence[str] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    bias: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A feed-forward layer whose experts are chosen for each token.

    router       the module whose product the choice goes by
    router_bias  that product has a bias
    choice_bias  the tensor of what is added where experts are chosen, and not to their shares
    expert       one of them; its names have {} for the number
    shared       what every token goes through besides
    shared_gate  the module whose sigmoid is the share of that; None means 1
    """

    choice: ExpertChoice
    expert: MLPConfig
    router: str = "mlp.gate"
    router_bias: bool = False
    choice_bias: str | None = None
    shared_mlp: MLPConfig | None = None
    shared_gate: str | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer: attention, then a feed-forward layer, each added to the residual.

    residual_factor  by which both are multiplied before they are added
    is_parallel      both read the same rows; no norm stands after them
    """

    attention: AttentionConfig | LatentConfig
    mlp: MLPConfig | ExpertsConfig
    norms: NormNames = NormNames()
    residual_factor: float = 1.0
    is_parallel: bool = False


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder: an embedding, layers, a norm and a head.

    unread_layers  how many more layers a checkpoint may have, which predict later tokens
    """

    norm: NormConfig
    layers: Sequence[LayerConfig]
    embedding_factor: float = 1.0
    logits_factor: float = 1.0
    logits_softcap: float | None = None
    embedding: str = "model.embed_tokens"
    last_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers"
    unread_layers: int = 0

"""Inspects a module of transformers: what its layers ask of attention, and what they keep."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.worker.layers.paged_pass import PagedLayer
from penstock.worker.models.folder.errors import UnsupportedFamily, reason
from penstock.worker.models.transformers.look import LOOK, NAME, CannotAttend, Look, attending
from penstock.worker.models.transformers.states import (
    CACHE_ARGUMENTS,
    TRIAL_TOKENS,
    SequenceStates,
    StatesLook,
)

# Kinds of layers, in a configuration.
_WITH_STATE = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_PLAIN = {"moe", "mlp"}  # they keep nothing
LAYERS = {"full_attention", "sliding_attention", *_WITH_STATE, *_PLAIN}


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of the look at a model.

    stay  the ids of products that modules compute from the weights by themselves
    """

    layers: list[PagedLayer]
    states: SequenceStates | None = None
    stay: frozenset[int] = frozenset()


@torch.inference_mode()
def look_at(causal: Any, hf: Any, device: torch.device, dtype: torch.dtype) -> Findings:
    """Run the module for one token, and return what its layers ask of attention, and keep.

    device, dtype  the cache's; a module without weights may be of another type
    """
    if "position_ids" not in inspect.signature(causal.base_model.forward).parameters:
        raise UnsupportedFamily(hf.model_type, "whose positions cannot be given")
    look = Look(lambda width: _cached_width(width, device, dtype))
    token = torch.zeros(1, dtype=torch.int64, device=causal.device)
    causal.set_attn_implementation(LOOK)
    # A mask that hides nothing keeps it from looking for several sequences in the row.
    mask = torch.ones_like(token)[None]
    keeps = StatesLook(hf, look) if _has_states(hf, type(causal)) else None
    try:
        with attending(look):
            if keeps is None:
                causal.base_model(input_ids=token[None], attention_mask=mask, use_cache=False)
            else:
                _look_at_states(causal.base_model, token, keeps)
    except CannotAttend as refusal:
        raise UnsupportedFamily(hf.model_type, str(refusal)) from refusal
    except Exception as error:  # many types: a module that takes no cache but its own
        if keeps is None:
            raise
        why = f"whose module takes no usual cache: {reason(error)}"
        raise UnsupportedFamily(hf.model_type, why) from error
    causal.set_attn_implementation(NAME)
    text = hf.get_text_config()
    if keeps is not None:
        states = SequenceStates(keeps.modules({causal.dtype: dtype}), device)
        layers = {*keeps.attention_layers, *keeps.layers_with_states}
        num_unknown = text.num_hidden_layers - len(layers) - _num_plain(text)
        if num_unknown or len(keeps.attention_layers) != len(look.layers):
            raise UnsupportedFamily(hf.model_type, "whose layers keep what is not known here")
        if causal.device.type != "meta":
            states.install()
            _try_out(causal, states, text.vocab_size)
        return Findings(look.layers, states, keeps.read_by_others())
    if text.num_hidden_layers not in (len(look.modules), len(look.layers)):
        why = f"of whose {text.num_hidden_layers} layers {len(look.modules)} have attention"
        raise UnsupportedFamily(hf.model_type, why)
    return Findings(look.layers)


def _has_states(hf: Any, kind: Any) -> bool:
    """Return whether layers may keep something of a sequence beside keys and values."""
    kinds = getattr(hf.get_text_config(), "layer_types", None) or ()
    return kind._is_stateful or any(layer_type in _WITH_STATE for layer_type in kinds)


def _num_plain(text: Any) -> int:
    """Return how many layers keep nothing."""
    return sum(kind in _PLAIN for kind in getattr(text, "layer_types", None) or ())


def _look_at_states(base: Any, token: Tensor, keeps: StatesLook) -> None:
    names = inspect.signature(base.forward).parameters
    name = next((argument for argument in CACHE_ARGUMENTS if argument in names), None)
    if name is None:
        raise CannotAttend("whose cache is none that transformers' other models have")
    mask = torch.ones_like(token)[None]
    with keeps.watching():
        base(input_ids=token[None], attention_mask=mask, use_cache=True, **{name: keeps})


def _try_out(causal: Any, states: SequenceStates, vocab_size: int) -> None:
    """Have the modules with states compute some tokens, each of which attends to itself alone."""
    tokens = torch.arange(TRIAL_TOKENS, device=causal.device) % vocab_size
    causal.set_attn_implementation(LOOK)
    with attending(Look(lambda width: width)), states.trying():
        causal.base_model(input_ids=tokens[None], use_cache=False)
    causal.set_attn_implementation(NAME)


def _cached_width(width: int, device: torch.device, dtype: torch.dtype) -> int:
    """Return how many numbers a head has in the cache: as compiled kernels take it, or its own."""
    takes_panels = device.type == "cpu" and dtype == torch.bfloat16 and width <= 256
    return -(-width // 32) * 32 if takes_panels else width

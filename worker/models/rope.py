"""The frequencies of a model's rotary positions, stretched in the ways that are supported."""

from dataclasses import dataclass

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.worker.models.errors import UnsupportedField, WrongValue
from penstock.worker.models.hugging_face import PreTrainedConfig

_STRETCHED = ("linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary frequencies: head_dim / 2 of them, in radians a position, exact in float32."""

    frequencies: tuple[float, ...]
    attention_factor: float


def rope(hf: PreTrainedConfig, head_dim: int) -> Rope:
    """Return the frequencies that a configuration asks for.

    transformers has unified the spellings: `rope_theta` with `rope_scaling`, and `rope_parameters`.
    Raises UnsupportedField for a way of stretching that is not supported.
    """
    parameters = hf.rope_parameters
    kind = parameters.get("rope_type")
    if kind is None and any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedField("rope_parameters", parameters, "one set of them for all layers")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedField(
            "partial_rotary_factor", parameters["partial_rotary_factor"], "heads rotated whole"
        )
    for field in ("rope_theta", "factor"):
        value = parameters.get(field, 1.0)
        if not isinstance(value, int | float) or value <= 0:
            raise WrongValue(f"rope_parameters.{field}", value, "with a number above 0")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return Rope(tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()), 1.0)
    if kind not in _STRETCHED:
        raise UnsupportedField("rope_type", kind, ", ".join(("default", *_STRETCHED)))
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](hf)
    return Rope(tuple(frequencies.tolist()), float(attention_factor))

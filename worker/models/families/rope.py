"""The frequencies of rotary positions (RoPE), and their ways of stretching.

These are linear, llama3, YaRN, LongRoPE and dynamic NTK.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.worker.models.folder.errors import BrokenModel, UnsupportedField, WrongValue

_STRETCHING_KINDS = ("linear", "llama3", "yarn", "longrope", "dynamic")


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotations of a head: number i is rotated with number i + head_dim / 2.

    frequencies       [head_dim / 2] in radians a position, exact in float32; 0 rotates nothing
    attention_factor  by which rotated numbers are multiplied
    order             where in a checkpoint's head the numbers lie, head_dim of them; None means
                      that they lie so
    longer            (the frequencies of a model that is served to more tokens than the second)
    """

    frequencies: tuple[float, ...]
    attention_factor: float
    order: tuple[int, ...] | None = None
    longer: tuple[tuple[float, ...], int] | None = None


def rope(
    hf: Any,
    head_dim: int,
    *,
    layer_type: str | None = None,
    interleaved: bool = False,
    partial: bool = False,
) -> Rope:
    """Return the rotations that a configuration asks for.

    transformers has unified the spellings: `rope_theta` with `rope_scaling`, and `rope_parameters`.
    Raises UnsupportedField for a way of stretching that is not supported.

    layer_type   the layers that are meant, where the configuration has parameters for each kind
    interleaved  number 2 i of a checkpoint's head is turned against 2 i + 1
    partial      `partial_rotary_factor` is obeyed: the first so many numbers of a head are turned
    """
    parameters = hf.rope_parameters
    try:
        parameters = parameters if layer_type is None else parameters[layer_type]
        return _rope(hf, parameters, head_dim, layer_type, interleaved, partial)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise BrokenModel(f"config.json: rope_parameters is {parameters!r}: {error}") from error


def _rope(
    hf: Any,
    parameters: Mapping[str, Any],
    head_dim: int,
    layer_type: str | None,
    interleaved: bool,
    partial: bool,
) -> Rope:
    kind, share = parameters.get("rope_type"), parameters.get("partial_rotary_factor", 1.0)
    if kind is None and any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedField("rope_parameters", parameters, "one set of them for all layers")
    if share != 1.0 and not partial:
        raise UnsupportedField("partial_rotary_factor", share, "heads rotated whole")
    for field in ("rope_theta", "factor"):
        value = parameters.get(field, 1.0)
        if not isinstance(value, int | float) or value <= 0:
            raise WrongValue(f"rope_parameters.{field}", value, "with a number above 0")
    rotary_dim = int(head_dim * share)
    order = _order(head_dim, rotary_dim, interleaved)
    fill = (0.0,) * ((head_dim - rotary_dim) // 2)
    if kind == "default":
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        frequencies = (1.0 / parameters["rope_theta"] ** exponents).tolist()
        return Rope((*frequencies, *fill), 1.0, order)
    if kind not in _STRETCHING_KINDS:
        raise UnsupportedField("rope_type", kind, ", ".join(("default", *_STRETCHING_KINDS)))
    longer, seq_len = None, None
    more = {} if layer_type is None else {"layer_type": layer_type}
    if kind in ("longrope", "dynamic"):
        original, length = stretched_lengths(kind, hf.max_position_embeddings, parameters)
        long_frequencies, _ = ROPE_INIT_FUNCTIONS[kind](hf, seq_len=length, **more)
        longer, seq_len = ((*long_frequencies.tolist(), *fill), original), original
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](hf, seq_len=seq_len, **more)
    return Rope((*frequencies.tolist(), *fill), float(attention_factor), order, longer)


def stretched_lengths(kind: str, made_for: int, parameters: Mapping[str, float]) -> tuple[int, int]:
    """Return the length up to which longrope or dynamic rotate as usual, and one that stretches.

    As in vLLM, who serves longer sequences than the first has all rotated as the longest is:
    transformers goes by the longest of a batch.
    """
    if kind == "dynamic":
        return made_for, int(made_for * parameters["factor"])
    original = int(parameters["original_max_position_embeddings"])
    return original, original + 1


def _order(head_dim: int, rotary_dim: int, interleaved: bool) -> tuple[int, ...] | None:
    half, rest = rotary_dim // 2, list(range(rotary_dim, head_dim))
    if interleaved:
        first, second = list(range(0, rotary_dim, 2)), list(range(1, rotary_dim, 2))
    else:
        first, second = list(range(half)), list(range(half, rotary_dim))
    middle = len(rest) // 2
    order = (*first, *rest[:middle], *second, *rest[middle:])
    return None if order == tuple(range(head_dim)) else order

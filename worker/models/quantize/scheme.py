"""The forms of numbers that are written, and what a configuration says of them.

The words are compressed-tensors', which vLLM and transformers read.
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

Method = Literal["gptq", "awq", "rtn", "int8", "fp8"]
GROUPS = (128, 64, 32, -1)  # -1: a whole row


@dataclass(frozen=True, slots=True)
class Scheme:
    """The form of a model's quantised weights.

    group_size     numbers of a row that share a scale; None: the whole row
    is_symmetric   a group has no zero point
    rounds_rows    what is multiplied is rounded too, each row by its largest number
    by_activity    GPTQ goes through columns by the strength of their inputs
    """

    method: Method
    bits: int
    group_size: int | None = None
    is_float: bool = False
    is_symmetric: bool = True
    rounds_rows: bool = False
    by_activity: bool = False

    @property
    def reads_inputs(self) -> bool:
        """Return whether weights are rounded by what they are multiplied with."""
        return self.method in ("gptq", "awq")

    @property
    def format(self) -> str:
        if self.is_float:
            return "float-quantized"
        return "int-quantized" if self.rounds_rows else "pack-quantized"

    def config(self) -> dict[str, JsonValue]:
        """Return `quantization_config` of config.json: all products of layers have this form."""
        kind = "float" if self.is_float else "int"
        weights: dict[str, JsonValue] = {
            "num_bits": self.bits,
            "type": kind,
            "symmetric": self.is_symmetric,
            "strategy": "group" if self.group_size else "channel",
            "group_size": self.group_size,
            "dynamic": False,
        }
        if self.by_activity:
            weights["actorder"] = "static"
        activations: dict[str, JsonValue] = {
            "num_bits": self.bits,
            "type": kind,
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
        group: dict[str, JsonValue] = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": activations if self.rounds_rows else None,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }


def scheme_of(method: Method, bits: int, group_size: int, by_activity: bool = False) -> Scheme:
    """Return the form that a method writes. Bits and group are of those that write groups.

    group_size  -1: a whole row
    """
    if method == "int8":
        return Scheme(method, 8, rounds_rows=True)
    if method == "fp8":
        return Scheme(method, 8, is_float=True, rounds_rows=True)
    group = None if group_size == -1 else group_size
    return Scheme(method, bits, group, is_symmetric=method != "awq", by_activity=by_activity)

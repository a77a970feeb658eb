"""How a model's products are computed."""

from dataclasses import dataclass, replace
from typing import Literal

from penstock.kernels.panel_linear import PACKINGS, Packing

Quantization = Literal["int8", "int4_g64", "int4_g128"]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """deterministic  a row's result is bitwise the same whatever is computed beside it
    quantization   bits of a weight's numbers; with 4, how many share a scale. None: as it is
    """

    deterministic: bool = False
    quantization: Quantization | None = None

    @property
    def packing(self) -> Packing:
        return PACKINGS[self.quantization or "bf16"]

    def of_head(self) -> "Arithmetic":
        """8 bits where the layers have 4: of all weights, a head's lose most by it."""
        return replace(self, quantization=self.quantization and "int8")


AS_IT_IS = Arithmetic()

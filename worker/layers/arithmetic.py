"""The arithmetic of a model's matrix products and of its attention."""

from dataclasses import dataclass, replace

from penstock.kernels.attention.backends import Backend, backends, told
from penstock.kernels.linear.panel_weight import PACKINGS, Packing
from penstock.worker.layers.choices import KvCacheDtype, Quantization

__all__ = ["AS_IT_IS", "Arithmetic", "Backend", "Packing", "backends", "told"]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The way in which a model's products and its attention are computed.

    deterministic  a row's result is bitwise the same whatever is computed beside it
    quantization   the bits of a weight's numbers and, with 4 bits, how many share a scale; None
                   keeps the weights as they are; fp8 multiplies rows of eight bits too
    attention      the backend that computes it
    kv_cache       what keys and values are kept as
    """

    deterministic: bool = False
    quantization: Quantization | None = None
    attention: Backend = "auto"
    kv_cache: KvCacheDtype = "auto"

    @property
    def packing(self) -> Packing:
        """Return the packing of a weight that is not of fp8."""
        return PACKINGS[self.quantization or "bf16"]

    @property
    def rounding(self) -> str:
        """Return what has fewer bits than the model's type, in words; empty where nothing has."""
        parts = []
        if self.quantization:
            parts.append(f"weights are rounded to {self.quantization} at the start")
        if self.kv_cache != "auto":
            parts.append(f"keys and values are kept in {self.kv_cache}")
        return "; ".join(parts)

    def of_head(self) -> "Arithmetic":
        """Return the arithmetic of the head: 8 bits where the layers have 4, and never fp8.

        Of all weights, the head's lose most by quantisation.
        """
        is_whole = self.quantization in (None, "fp8")
        return replace(self, quantization=None if is_whole else "int8")

    def of_router(self) -> "Arithmetic":
        """Return the arithmetic of products that choose experts, which are never quantised."""
        return replace(self, quantization=None)


AS_IT_IS = Arithmetic()

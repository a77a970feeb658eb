"""The scales of keys and values that a checkpoint has for a cache of fp8, one of each for a layer.

What stands in the cache is a number divided by its scale, as with vLLM.
"""

import math

from torch import Tensor

from penstock.worker.layers.attention import NO_SCALES, KvScales
from penstock.worker.models.folder.errors import BrokenModel
from penstock.worker.models.folder.integers import Tensors

# Below an attention's module: llm-compressor's and vLLM's, Quark's, modelopt's, and one for both.
_KEY = ("k_scale", "attn.k_scale", "k_proj.k_scale", "kv_scale")
_VALUE = ("v_scale", "attn.v_scale", "v_proj.v_scale", "kv_scale")
ENDS = (".k_scale", ".v_scale", ".kv_scale")
_WAY_OUT = "mend the checkpoint, or leave kv_cache_dtype out"


def kv_scales(tensors: Tensors, module: str) -> KvScales:
    """Return the scales of an attention's module; ones where it has none. Raises BrokenModel."""
    key, value = (
        next((name for end in ends if tensors.has(name := f"{module}.{end}")), None)
        for ends in (_KEY, _VALUE)
    )
    if key is None and value is None:
        return NO_SCALES
    if key is None or value is None:
        place = tensors.place(key or value or "")
        raise BrokenModel(f"{place}: the other of k_scale and v_scale is missing; {_WAY_OUT}")
    return KvScales(_scale(tensors, key), _scale(tensors, value))


def _scale(tensors: Tensors, name: str) -> float:
    tensor: Tensor = tensors.tensor(name)
    if tensor.numel() != 1:
        raise BrokenModel(
            f"{tensors.place(name)} has shape {list(tensor.shape)}, and a scale of keys or values "
            f"is one number; {_WAY_OUT}"
        )
    scale = float(tensor)
    if not (math.isfinite(scale) and scale > 0):
        raise BrokenModel(
            f"{tensors.place(name)} is {scale:g}, and a scale is a number above 0; {_WAY_OUT}"
        )
    return scale

"""Numbers of four bits that are no integers: bitsandbytes' nf4 and fp4."""

import json

import torch
from torch import Tensor

from penstock.worker.models.folder.errors import BrokenModel
from penstock.worker.models.folder.integers import Tensors

_STATES = ("nf4", "fp4")


def four_bit_rows(module: str, shape: tuple[int, int], tensors: Tensors) -> Tensor | None:
    """Return a weight [rows, columns] float32; None where the module has no such numbers.

    A byte of `weight` holds two places in the table `quant_map`, the first in its high bits; of
    each block of them the largest is `absmax`, which may itself be a place in a table. Raises
    BrokenModel where these do not fit one another.
    """
    weight = f"{module}.weight"
    names = (f"{weight}.quant_state.bitsandbytes__{kind}" for kind in _STATES)
    name = next((name for name in names if tensors.has(name)), None)
    if name is None:
        return None
    try:
        state = json.loads(bytes(tensors.tensor(name).tolist()))
        size, whole = int(state["blocksize"]), list(state["shape"])
        numbers, table = tensors.tensor(weight).flatten(), tensors.tensor(f"{weight}.quant_map")
        largest = _largest(state, weight, tensors)
        places = torch.stack((numbers >> 4, numbers & 15), -1).flatten()
        values = table.float()[places.long()].view(-1, size) * largest.view(-1, 1)
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise BrokenModel(
            f"{tensors.place(name)} does not fit the weight's numbers: {error}"
        ) from error
    if tuple(whole) != shape or values.numel() != shape[0] * shape[1]:
        raise BrokenModel(
            f"{tensors.place(weight)} has {whole}, and the configuration asks for {list(shape)}"
        )
    return values.view(shape)


def _largest(state: dict[str, object], weight: str, tensors: Tensors) -> Tensor:
    numbers = tensors.tensor(f"{weight}.absmax")
    if "nested_blocksize" not in state:
        return numbers.float()
    table, most = (tensors.tensor(f"{weight}.nested_{name}") for name in ("quant_map", "absmax"))
    factors = most.float().repeat_interleave(int(str(state["nested_blocksize"])))
    return table.float()[numbers.long()] * factors[: len(numbers)] + float(
        str(state["nested_offset"])
    )

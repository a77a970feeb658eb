"""Draws a token for each row of logits by the row's temperature, top_k, top_p, min_p and seed.

    logits     [rows, vocab]             float32, contiguous; a masked row is changed
    positions  [rows]                    int64; the token's position in the row's completion
    masks      [rows, ceil(vocab / 32)]  int32 on the host, read where a row is masked; token t is
                                         bit t % 32 of word t // 32, and 1 allows it
    returns    [rows]                    int64; NO_TOKEN where the largest logit is not finite

A row's random number follows from its seed, choice and position. The compiled operation and the
reference give the same tokens, whatever the batch.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.cpu.library import compiled_ops
from penstock.kernels.numbers.device import TRITON_DEVICES
from penstock.kernels.numbers.transfers import send
from penstock.kernels.sampling.draw import (
    LOG2_E,
    STEEPEST,
    UNIT,
    Cut,
    draw,
    draw_cut,
    likeliest,
    mass,
)
from penstock.kernels.sampling.philox import Words, key_schedule, uniforms
from penstock.kernels.sampling.token_mask import apply_token_mask, byte_penalties

NO_TOKEN = -1

# The parameters of one row, with the layout that cpu/sample.c has. Temperature 0 takes the
# likeliest token. top_k 0, top_p 1 and min_p 0 keep all tokens. is_masked is 0 or 1.
WAY = np.dtype(
    [
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
        ("choice", np.int32),
        ("top_k", np.int32),
        ("is_masked", np.int32),
        ("temperature", np.float32),
    ]
)
Ways = NDArray[np.void]  # [rows], each a WAY

# (logits, positions, masks) -> tokens
Sample = Callable[[Tensor, NDArray[np.int64], Tensor | None], Tensor]


def plan_sample(ways: Ways, vocab: int, device: torch.device) -> Sample:
    """Return the function that draws the tokens of one batch of rows, step after step."""
    if device.type in TRITON_DEVICES:
        return SampleOnGpu(ways, vocab, device)
    ops = _ops_on(device)
    if ops is None:
        return SampleRef(ways, vocab, device)
    return lambda logits, positions, masks: sample_compiled(ops, ways, logits, positions, masks)


def sample_compiled(
    ops: ctypes.CDLL, ways: Ways, logits: Tensor, positions: NDArray[np.int64], masks: Tensor | None
) -> Tensor:
    assert logits.is_contiguous()
    tokens = torch.empty(len(ways), dtype=torch.int64)
    status = ops.sample(
        logits.data_ptr(),
        ways.ctypes.data,
        positions.ctypes.data,
        None if masks is None else masks.data_ptr(),
        tokens.data_ptr(),
        *logits.shape,
    )
    if status:
        raise MemoryError(f"{len(ways)} rows found no memory for what they keep")
    return tokens


class SampleOnGpu:
    """Draws by Triton's kernel, which reads the ways as columns on the device."""

    def __init__(self, ways: Ways, vocab: int, device: torch.device) -> None:
        # Imported here: not every platform without a GPU has triton.
        from penstock.kernels.sampling.sample_triton import sample_triton

        self._kernel = sample_triton
        self._device = device
        self._masked_rows = ways["is_masked"].nonzero()[0]
        top_k = np.where(ways["top_k"] > 0, ways["top_k"], vocab).clip(max=vocab)
        with np.errstate(divide="ignore", over="ignore"):
            scales = (np.float32(LOG2_E) / ways["temperature"]).clip(max=np.float32(STEEPEST))
            least_powers = np.log2(ways["min_p"]).astype(np.float32)
        scales[ways["temperature"] == 0] = 0
        columns = [scales, top_k.astype(np.int32), ways["top_p"].copy(), least_powers]
        self._columns = send(columns, device)
        self._keys, self._choices = key_schedule(ways["seed"].tolist()), ways["choice"].tolist()
        self._zeros = torch.zeros(len(ways), dtype=torch.float64, device=device)
        self._draws = bool((ways["temperature"] > 0).any())

    def __call__(
        self, logits: Tensor, positions: NDArray[np.int64], masks: Tensor | None
    ) -> Tensor:
        forbid(logits, masks, self._masked_rows)
        numbers = self._zeros
        if self._draws:
            host_numbers = uniforms(self._keys, self._choices, positions.tolist())
            (numbers,) = send([host_numbers], self._device)
        scales, top_ks, top_ps, least_powers = self._columns
        return self._kernel(logits, scales, top_ks, top_ps, least_powers, numbers)


class SampleRef:
    """Draws in torch, on any device: each kind of draw over all rows that ask for it."""

    def __init__(self, ways: Ways, vocab: int, device: torch.device) -> None:
        draws = ways["temperature"] > 0
        is_cut = (ways["top_k"] > 0) | (ways["top_p"] < 1) | (ways["min_p"] > 0)
        self._free = _group(ways, draws & ~is_cut, vocab, device)
        self._cut = _group(ways, draws & is_cut, vocab, device)
        self._masked_rows = ways["is_masked"].nonzero()[0]

    def __call__(
        self, logits: Tensor, positions: NDArray[np.int64], masks: Tensor | None
    ) -> Tensor:
        forbid(logits, masks, self._masked_rows)
        top, tokens = likeliest(logits)
        if (group := self._free) is not None:
            tokens[group.index] = draw(
                group.of(logits), group.temperature, group.uniforms(positions)
            )
        if (group := self._cut) is not None:
            tokens[group.index] = draw_cut(
                group.of(logits), group.temperature, group.cut, group.uniforms(positions)
            )
        return tokens.masked_fill_(~top.isfinite(), NO_TOKEN)


def forbid(logits: Tensor, masks: Tensor | None, rows: NDArray[np.int64]) -> None:
    """Apply the masks of `rows` to their logits, in place."""
    if masks is None or not len(rows):
        return
    penalties, words = _byte_penalties(logits.device), masks.numpy()
    if len(rows) == len(logits):
        apply_token_mask(logits, send([words], logits.device)[0], penalties)
        return
    index, row_masks = send([rows, words[rows]], logits.device)
    row_logits = logits[index]
    apply_token_mask(row_logits, row_masks, penalties)
    logits[index] = row_logits


def log_total(logits: Tensor) -> Tensor:
    """Return the logarithm of the sum of each row's exponentials [rows], float64."""
    ops = _ops_on(logits.device)
    sums = mass_ref(logits) if ops is None else mass_compiled(ops, logits)
    return logits.amax(-1).double() + (sums.double() / UNIT).log()


def mass_ref(logits: Tensor) -> Tensor:
    """Return the sum of each row's weights at temperature 1 [rows], int64."""
    return mass(logits, torch.ones(len(logits), device=logits.device))


def mass_compiled(ops: ctypes.CDLL, logits: Tensor) -> Tensor:
    assert logits.is_contiguous()
    sums = torch.empty(len(logits), dtype=torch.int64)
    if ops.mass(logits.data_ptr(), sums.data_ptr(), *logits.shape):
        raise MemoryError(f"{len(logits)} rows found no memory for their sums")
    return sums


@dataclass(frozen=True, slots=True)
class _Group:
    """The rows that draw in one way, with columns [rows of the group]."""

    places: NDArray[np.int64]
    index: Tensor  # the same, on the device
    is_all: bool
    temperature: Tensor
    cut: Cut
    keys: Words
    choices: list[int]

    def uniforms(self, positions: NDArray[np.int64]) -> Tensor:
        numbers = uniforms(self.keys, self.choices, positions[self.places].tolist())
        return send([numbers], self.index.device)[0]

    def of(self, logits: Tensor) -> Tensor:
        return logits if self.is_all else logits[self.index]


def _group(ways: Ways, mask: NDArray[np.bool_], vocab: int, device: torch.device) -> _Group | None:
    if not mask.any():
        return None
    rows = ways[mask]
    top_k = np.where(rows["top_k"] > 0, rows["top_k"], vocab).clip(max=vocab)

    places = mask.nonzero()[0]
    columns = [places, rows["temperature"], top_k.astype(np.int64), rows["top_p"], rows["min_p"]]
    index, temperature, top_ks, top_ps, min_ps = send(columns, device)
    return _Group(
        places,
        index,
        len(rows) == len(ways),
        temperature,
        Cut(top_ks, top_ps, min_ps),
        key_schedule(rows["seed"].tolist()),
        rows["choice"].tolist(),
    )


def _ops_on(device: torch.device) -> ctypes.CDLL | None:
    return compiled_ops() if device.type == "cpu" else None


_byte_penalties = cache(byte_penalties)

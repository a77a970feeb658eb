"""Masks that forbid tokens: a bit for each token of each row says whether it may come next.

logits   [rows, vocab]             float32, changed in place
bitmask  [rows, ceil(vocab / 32)]  int32; token t is bit t % 32 of word t // 32; 1 allows it
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding


def apply_token_mask(logits: Tensor, bitmask: Tensor, penalties: Tensor) -> None:
    """Set the logits of forbidden tokens to minus infinity; `penalties` is `byte_penalties`'s."""
    rows, vocab = logits.shape
    bias = embedding(bitmask.view(torch.uint8).int(), penalties)  # [rows, bytes, 8]
    logits.add_(bias.view(rows, -1)[:, :vocab])


def byte_penalties(device: torch.device) -> Tensor:
    """Return what each of a byte's eight bits adds to its logit [256, 8]: 0 or minus infinity.

    A lookup is six times faster on a CPU than spreading the bits and filling under a boolean mask.
    """
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.zeros(256, 8).masked_fill_(bits == 0, -torch.inf).to(device)


def allow_all_but(ids: list[int], vocab_size: int) -> Tensor:
    """Return a mask [ceil(vocab / 32)] that forbids these ids and all past the vocabulary."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[:vocab_size] = True
    bits[ids] = False
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))

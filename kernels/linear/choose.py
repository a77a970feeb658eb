"""The choice of experts (MoE routing) for each token, by a router's logits.

logits   [tokens, num_experts] float32, contiguous
bias     [num_experts] float32, added to the scores by which experts are chosen, not to the shares
returns  numbers of experts, int32, and their shares, float32: [tokens, num_chosen]
"""

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.kernels.cpu.library import compiled_ops


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The way in which experts are chosen.

    scoring     how logits become scores
    groups      how many groups of equal size there are, and from how many experts are chosen
    of_best     a group counts by the sum of so many of its best scores
    normalises  the shares of those chosen add up to 1
    factor      by which shares are multiplied
    """

    num_experts: int
    num_chosen: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: tuple[int, int] = (1, 1)
    of_best: int = 1
    normalises: bool = True
    factor: float = 1.0


def choose(logits: Tensor, choice: ExpertChoice, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    ops = compiled_ops() if logits.device.type == "cpu" else None
    if ops is not None:
        return choose_compiled(ops, logits, choice, bias)
    return choose_ref(logits, choice, bias)


def choose_ref(logits: Tensor, choice: ExpertChoice, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1) if choice.scoring == "softmax" else logits.sigmoid()
    ranks = scores if bias is None else scores + bias
    num_groups, chosen_groups = choice.groups
    if chosen_groups < num_groups:
        group_ranks = ranks.view(len(ranks), num_groups, -1)
        best = group_ranks.topk(choice.of_best, -1).values.sum(-1)
        left_out = torch.ones_like(best, dtype=torch.bool)
        left_out.scatter_(1, best.topk(chosen_groups, -1).indices, False)
        ranks = group_ranks.masked_fill(left_out[..., None], -torch.inf).view(ranks.shape)
    experts = ranks.topk(choice.num_chosen, -1).indices
    shares = scores.gather(1, experts)
    if choice.normalises:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return experts.to(torch.int32), shares * choice.factor


def choose_compiled(
    ops: ctypes.CDLL, logits: Tensor, choice: ExpertChoice, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    experts = torch.empty(len(logits), choice.num_chosen, dtype=torch.int32)
    shares = torch.empty(len(logits), choice.num_chosen)
    packed_choice = PackedChoice(
        None if bias is None else bias.data_ptr(),
        choice.num_experts,
        choice.num_chosen,
        choice.scoring == "softmax",
        *choice.groups,
        choice.of_best,
        choice.normalises,
        choice.factor,
    )
    ops.choose(
        logits.data_ptr(),
        ctypes.byref(packed_choice),
        experts.data_ptr(),
        shares.data_ptr(),
        len(logits),
    )
    return experts, shares


class PackedChoice(ctypes.Structure):
    _fields_ = (
        ("bias", ctypes.c_void_p),
        *[
            (name, ctypes.c_int)
            for name in (
                *("num", "chosen", "is_softmax", "groups", "chosen_groups"),
                *("of_best", "normalises"),
            )
        ],
        ("factor", ctypes.c_float),
    )

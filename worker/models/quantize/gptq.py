"""GPTQ: the error of a rounded column is passed on to those that are not rounded yet.

Frantar, Ashkboos, Hoefler, Alistarh: "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers", 2022, algorithm 1. With X the inputs, H = X^T X says what an error of
the weights costs: tr(D H D^T). Columns are rounded from left to right; the Cholesky factor of the
inverse of H says what each of the rest is to become so that this cost is least.
"""

import torch
from torch import Tensor

from penstock.worker.models.quantize.rounding import Grid, Rounded, grid_of
from penstock.worker.models.quantize.scheme import Scheme

_BLOCK = 128  # columns whose errors are passed on together to all behind them
_DAMPINGS = (0.01, 0.1, 1.0)  # shares of the diagonal's mean, the first that is enough


def gptq(weight: Tensor, hessian: Tensor, scheme: Scheme, dtype: torch.dtype) -> Rounded:
    """Return the weight [rows, columns] rounded by what it is multiplied with.

    A group's grid is of its weights as they are once the errors before it came to them. By activity
    columns are out of order, and grids are of the weights as they were.

    hessian  [columns, columns]
    dtype    of the scales where they are written
    """
    weight, hessian = weight.float().clone(), hessian.clone()
    columns = weight.shape[1]
    size = scheme.group_size or columns
    unused = hessian.diagonal() == 0
    hessian.diagonal()[unused] = 1.0
    weight[:, unused] = 0.0
    order = torch.arange(columns, device=weight.device)
    grids: list[Grid] = []
    if scheme.by_activity:
        groups = weight.view(len(weight), -1, size)
        grids = [grid_of(groups[:, at], scheme, dtype) for at in range(columns // size)]
        order = hessian.diagonal().argsort(descending=True)
        weight, hessian = weight[:, order], hessian[order][:, order]
    numbers = _passed_on(weight, _factor(hessian), order.tolist(), size, scheme, dtype, grids)
    whole = torch.empty_like(numbers)
    whole[:, order] = numbers
    scale = torch.stack([grid.scale for grid in grids], 1)
    return Rounded(whole, Grid(scale, torch.stack([grid.zero for grid in grids], 1)))


def _factor(hessian: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse, damped until there is one."""
    mean = hessian.diagonal().mean()
    unit = torch.eye(len(hessian), device=hessian.device)
    for share in _DAMPINGS:
        lower: Tensor
        upper: Tensor
        lower, lower_failure = torch.linalg.cholesky_ex(hessian + unit * (share * mean))
        upper, failure = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not (lower_failure or failure):
            return upper
    return unit  # nothing is passed on


def _passed_on(
    weight: Tensor,
    factor: Tensor,
    order: list[int],
    size: int,
    scheme: Scheme,
    dtype: torch.dtype,
    grids: list[Grid],
) -> Tensor:
    """Return the numbers of columns that lie in an order; a grid is added where a group begins.

    No group begins within a block and ends behind it, so a grid sees all errors before it.
    """
    columns = weight.shape[1]
    numbers = torch.empty_like(weight)
    for begin in range(0, columns, _BLOCK):
        end = min(begin + _BLOCK, columns)
        block, errors = weight[:, begin:end], torch.empty_like(weight[:, begin:end])
        for at in range(begin, end):
            group = order[at] // size
            if group == len(grids):
                grids.append(grid_of(weight[:, at : at + size], scheme, dtype))
            grid = grids[group]
            column = block[:, at - begin]
            numbers[:, at] = grid.numbers(column, scheme)
            error = (column - grid.dense(numbers[:, at])) / factor[at, at]
            block[:, at - begin :] -= error[:, None] * factor[at, at:end]
            errors[:, at - begin] = error
        weight[:, end:] -= errors @ factor[begin:end, end:]
    return numbers

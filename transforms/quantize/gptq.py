"""GPTQ: round the columns of a weight one after another; those behind make up for the error of those before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.state import dequantized, quantized

__all__ = ["gptq"]

_BLOCK = 128
_DAMPED_AGAIN = 10.0
_TRIES = 6


def gptq(weight: Tensor, moments: Tensor, form: str, group: int, *, damp: float, by_size: bool) -> Tensor | None:
    """Return a weight, [outputs, inputs], that is held in a format without further error; None where all is zero.

    Frantar et al., "GPTQ" (ICLR 2023, arXiv:2210.17323), algorithm 1. `moments`: x.T @ x over calibration data.
    `damp`: so much of the mean of its diagonal is added to that. `by_size`: the inputs with the largest moments first.
    Scales are those of the rounded weight (as with static groups), and the largest number of each group stays: so the
    result is rounded to itself, and needs no more than its floats to come back from checkpoints.
    """
    diagonal = moments.diagonal()
    mean = float(diagonal.mean())
    if not mean > 0:
        return None
    numbers, scales = _whole(weight, form, group)
    most = float(numbers.abs().max())
    if not most:
        return None
    fixed = _fixed(numbers, scales)
    order = torch.argsort(diagonal, descending=True) if by_size else torch.arange(len(diagonal))
    root = _root_of_inverse(moments[order][:, order], diagonal[order], damp * mean)
    steps = scales.reshape(len(scales), -1).repeat_interleave(weight.shape[1] // max(scales[0].numel(), 1), 1)
    steps = steps.expand(weight.shape)
    columns = _Columns(*(each.T[order].contiguous() for each in (weight.float(), steps, numbers, fixed)))
    found = torch.empty_like(columns.weight)
    found[order] = columns.rounded(root, most)
    return found.T.to(weight.dtype).contiguous()


def _whole(weight: Tensor, form: str, group: int) -> tuple[Tensor, Tensor]:
    """Return the numbers to which a weight is rounded, [outputs, inputs] of float32, and their scales."""
    values, scales = quantized(weight, form, group)
    return dequantized(values, torch.ones_like(scales), form, torch.float32), scales.float()


def _fixed(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return where numbers must stay: at a largest one of each group, and where all are zero."""
    rows = numbers.abs().reshape(*scales.shape, -1)
    largest = torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, rows.argmax(-1, keepdim=True), True)
    return (largest | (rows.amax(-1, keepdim=True) == 0)).reshape(numbers.shape)


def _root_of_inverse(moments: Tensor, diagonal: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse of damped moments; inputs that are always 0 stand alone."""
    linalg: Any = torch.linalg
    moments = moments.double()
    for _ in range(_TRIES):
        damped = moments + torch.diag(torch.where(diagonal > 0, damping, 1.0).double())
        lower, failed = linalg.cholesky_ex(damped)
        if not failed:
            root, failed = linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return root.float()
        damping *= _DAMPED_AGAIN
    return torch.diag(torch.ones(len(moments)))


class _Columns:
    """A weight by its columns, [inputs, outputs], in the order in which they are rounded."""

    def __init__(self, weight: Tensor, steps: Tensor, numbers: Tensor, fixed: Tensor) -> None:
        self.weight, self._steps, self._numbers, self._fixed = weight, steps, numbers, fixed

    def rounded(self, root: Tensor, most: float) -> Tensor:
        """Return the columns rounded; a block passes what it is off on to the columns behind it at once."""
        found = torch.empty_like(self.weight)
        for start in range(0, len(self.weight), _BLOCK):
            end = min(start + _BLOCK, len(self.weight))
            errors = torch.empty_like(self.weight[start:end])
            for each in range(start, end):
                column, step = self.weight[each], self._steps[each]
                whole = torch.where(
                    self._fixed[each], self._numbers[each], (column / step).round_().clamp_(-most, most)
                )
                found[each] = whole * step
                errors[each - start] = (column - found[each]) / root[each, each]
                self.weight[each + 1 : end].addr_(root[each, each + 1 : end], errors[each - start], alpha=-1)
            self.weight[end:].addmm_(root[start:end, end:].T, errors, alpha=-1)
        return found

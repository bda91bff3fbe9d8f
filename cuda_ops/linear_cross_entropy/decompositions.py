"""How the loss of a linear head is written without `linear_cross_entropy` of fxopt: with all the logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UsageError
from ..definition import Kernel
from .definition import reduced_loss

__all__ = ["KERNELS"]

_Change = Callable[[Tensor], Tensor]

_SHIFTS: tuple[tuple[_Change, bool], ...] = (
    (lambda logits: logits, False),
    (lambda logits: logits[..., :-1, :], True),
    (lambda logits: logits[:, :-1, :], True),
    (lambda logits: logits[:, :-1], True),
    (lambda logits: logits[..., :-1, :].contiguous(), True),
    (lambda logits: logits[:, :-1, :].contiguous(), True),
    (lambda logits: logits[:, :-1].contiguous(), True),
)
"""What is done to logits of a sequence, and whether that leaves the last place out: it has no next token."""
_ROWS: tuple[_Change, ...] = (
    lambda logits: logits,
    lambda logits: logits.transpose(1, 2),
    lambda logits: logits.transpose(-1, -2),
    lambda logits: logits.permute(0, 2, 1),
    lambda logits: logits.flatten(0, 1),
    lambda logits: logits.flatten(0, -2),
    lambda logits: logits.view(-1, logits.size(-1)),
    lambda logits: logits.view(-1, logits.shape[-1]),
    lambda logits: logits.reshape(-1, logits.size(-1)),
    lambda logits: logits.reshape(-1, logits.shape[-1]),
)
"""How logits become rows, without a number; or classes come where `cross_entropy` wants them."""
_NUMBERED: tuple[Callable[[Tensor, int], Tensor], ...] = (
    lambda logits, classes: logits.view(-1, classes),
    lambda logits, classes: logits.reshape(-1, classes),
)


def _spellings(shift: _Change, shifted: bool) -> tuple[Callable[..., Tensor], ...]:
    """Return the decompositions with one way to shift logits."""

    def as_rows(rows: _Change) -> Callable[..., Tensor]:
        def spelling(
            x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, ignore_index: int, label_smoothing: float,
            reduction: str, leaves_last: bool = shifted,
        ) -> Tensor:  # fmt: skip
            logits = rows(shift(F.linear(x, weight, bias)))
            return F.cross_entropy(
                logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
            )

        return spelling

    def as_numbered_rows(rows: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
        def spelling(
            x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, ignore_index: int, label_smoothing: float,
            reduction: str, classes: int, leaves_last: bool = shifted,
        ) -> Tensor:  # fmt: skip
            logits = rows(shift(F.linear(x, weight, bias)), classes)
            return F.cross_entropy(
                logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
            )

        return spelling

    return (*map(as_numbered_rows, _NUMBERED), *map(as_rows, _ROWS))


def _linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    leaves_last: bool,
    classes: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    if reduction not in ("mean", "sum"):
        raise UsageError(f"its reduction is {reduction!r}, and the operator gives 'mean' or 'sum'")
    if isinstance(x, Tensor):
        _check_shapes(x, weight, target, classes, leaves_last)
    rows = x[..., :-1, :] if leaves_last else x
    rows, target = rows.flatten(0, -2), target.flatten().to(torch.int64)  # `cross_entropy` takes uint8, too
    return reduced_loss(rows, weight, bias, target, None, ignore_index, label_smoothing, 0.0, 0.0, 0, reduction)


def _check_shapes(x: Tensor, weight: Tensor, target: Tensor, classes: int | None, leaves_last: bool) -> None:
    """Make sure that each row has its target: other shapes are other losses."""
    if classes is not None and classes != weight.shape[0]:
        raise UsageError(f"its rows have {classes} numbers, and the head gives {weight.shape[0]}")
    if not target.dtype.is_floating_point and x.dim() > 1:
        rows = x[..., :-1, 0].numel() if leaves_last else x[..., 0].numel()
        if rows == target.numel():
            return
    raise UsageError(f"its target has shape {tuple(target.shape)} and {target.dtype}, not one class for each row")


KERNELS = (
    Kernel(
        "linear_cross_entropy",
        _linear_cross_entropy,
        tuple(itertools.chain.from_iterable(_spellings(*each) for each in _SHIFTS)),
    ),
)

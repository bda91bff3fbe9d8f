"""The kernel of `linear_cross_entropy`: each program goes twice over the logits of one row; products are torch's."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chunks import Head, gradients, losses

__all__ = ["linear_cross_entropy", "linear_cross_entropy_backward", "linear_cross_entropy_step"]

_BLOCK = 4096


@triton.jit
def _rows(logits, target, scale, losses, classes, smoothing, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * classes
    index = tl.load(target + row)
    picked = tl.load(first + index, (index >= 0) & (index < classes), other=float("nan"))
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    summed = tl.full((), 0.0, tl.float32)
    for start in range(0, classes, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(first + at, at < classes, other=float("-inf"))
        larger = tl.maximum(largest, tl.max(value))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(value - larger))
        summed += tl.sum(tl.where(at < classes, value, 0.0))
        largest = larger
    loss = tl.log(total) + largest - (1 - smoothing) * picked - smoothing * summed / classes
    tl.store(losses + row, loss)
    if GRADIENTS:
        factor = tl.load(scale + row)
        for start in range(0, classes, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(first + at, at < classes, other=0.0)
            of_value = tl.exp(value - largest) / total - smoothing / classes
            of_value -= tl.where(at == index, 1 - smoothing, 0.0)
            tl.store(first + at, factor * of_value, at < classes)


def _in_triton(logits: Tensor, target: Tensor, scale: Tensor, smoothing: float, wants_gradients: bool) -> Tensor:
    found = torch.empty_like(scale)
    if logits.numel():
        block = min(_BLOCK, triton.next_power_of_2(logits.shape[1]))
        _rows[logits.shape[0],](
            logits, target, scale, found, logits.shape[1], smoothing, GRADIENTS=wants_gradients, BLOCK=block
        )
    return found


def linear_cross_entropy(*args: Any) -> Tensor:
    """Return the loss of each row."""
    return losses(Head(*args), _in_triton)


def linear_cross_entropy_step(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sum of the losses, and its gradients."""
    return gradients(Head(*args), None, _in_triton)


def linear_cross_entropy_backward(grad: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the losses, each row times its factor."""
    return gradients(Head(*args), grad, _in_triton)[1:]

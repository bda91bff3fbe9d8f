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
def _capped(value, softcap):
    return softcap * (2 * tl.sigmoid(2 * value / softcap) - 1)


@triton.jit
def _gradients(
    first, weights, index, of_share, of_target, of_all, largest, classes, softcap, WEIGHTED: tl.constexpr,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for start in range(0, classes, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(first + at, at < classes, other=0.0)
        slope = tl.full((BLOCK,), 1.0, tl.float32)
        if CAPPED:
            value = _capped(value, softcap)
            slope -= (value / softcap) * (value / softcap)
        each = tl.full((BLOCK,), 1.0, tl.float32)
        if WEIGHTED:
            each = tl.load(weights + at, at < classes, other=0.0)
        of_value = of_share * tl.exp(value - largest) - of_all * each - tl.where(at == index, of_target, 0.0)
        tl.store(first + at, slope * of_value, at < classes)


@triton.jit
def _rows(
    logits, target, scale, weights, losses, classes, smoothing, softcap, z_loss, WEIGHTED: tl.constexpr,
    CAPPED: tl.constexpr, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * classes
    index = tl.load(target + row)
    picked = tl.load(first + index, (index >= 0) & (index < classes), other=float("nan"))
    share = 1 - smoothing
    if CAPPED:
        picked = _capped(picked, softcap)
    if WEIGHTED:
        share *= tl.load(weights + index, (index >= 0) & (index < classes), other=float("nan"))
    whole = tl.full((), 0.0, tl.float32)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    summed = tl.full((), 0.0, tl.float32)
    for start in range(0, classes, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(first + at, at < classes, other=float("-inf"))
        if CAPPED:
            value = tl.where(at < classes, _capped(value, softcap), float("-inf"))
        larger = tl.maximum(largest, tl.max(value))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(value - larger))
        each = tl.where(at < classes, 1.0, 0.0)
        if WEIGHTED:
            each = tl.load(weights + at, at < classes, other=0.0)
        whole += tl.sum(each)
        summed += tl.sum(tl.where(at < classes, each * value, 0.0))
        largest = larger
    whole = share + smoothing * whole / classes
    log_total = tl.log(total) + largest
    loss = whole * log_total - share * picked - smoothing * summed / classes + z_loss * log_total * log_total
    tl.store(losses + row, loss)
    if GRADIENTS:
        factor = tl.load(scale + row)
        _gradients(
            first, weights, index, factor * (whole + 2 * z_loss * log_total) / total, factor * share,
            factor * smoothing / classes, largest, classes, softcap, WEIGHTED, CAPPED, BLOCK,
        )  # fmt: skip


def _in_triton(logits: Tensor, target: Tensor, scale: Tensor, head: Head, wants_gradients: bool) -> Tensor:
    found = torch.empty_like(scale)
    weights = scale if head.class_weight is None else head.class_weight.to(logits.dtype).contiguous()
    if logits.numel():
        block = min(_BLOCK, triton.next_power_of_2(logits.shape[1]))
        _rows[logits.shape[0],](
            logits, target, scale, weights, found, logits.shape[1], head.label_smoothing, head.softcap, head.z_loss,
            WEIGHTED=head.class_weight is not None, CAPPED=bool(head.softcap), GRADIENTS=wants_gradients, BLOCK=block,
        )  # fmt: skip
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

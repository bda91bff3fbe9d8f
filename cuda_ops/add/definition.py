"""What `add` is: reference, checks, results' shapes, gradient; everything but the kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_floating, check_one_device
from ..definition import define, elementwise

__all__ = ["add"]


def _reference(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
    return torch.add(x, y, alpha=alpha).contiguous()


def _check(x: Tensor, y: Tensor, alpha: float = 1.0) -> None:
    check_floating("add", x=x, y=y)
    check_one_device("add", x=x, y=y)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, y, ctx.alpha = inputs
    ctx.x, ctx.y = (x.shape, x.dtype), (y.shape, y.dtype)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    wanted_x, wanted_y = ctx.needs_input_grad[:2]  # torch leaves defaults out
    return (
        _summed(grad, *ctx.x) if wanted_x else None,
        _summed(grad * ctx.alpha, *ctx.y) if wanted_y else None,
        None,
    )


def _summed(grad: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the gradient of an operand that was broadcast."""
    return grad.sum_to_size(shape).to(dtype)


_add = define(
    "add",
    _reference,
    check=_check,
    kernel="add.triton_kernel:add",
    setup=_setup,
    backward=_backward,
    batching=elementwise,
)


def add(x: Tensor, y: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Return `x + alpha * y`, of the operands' common shape and dtype.

    Operands are floating-point and on one device, or a UsageError is raised; their shapes broadcast.
    """
    return _add(x, y, alpha)

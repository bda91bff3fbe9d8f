"""What `log_clip` and its gradient are: references, checks, results' shapes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...errors import UsageError
from ..checks import check_one_device, check_one_dtype
from ..definition import define, elementwise, keep_inputs

__all__ = ["log_clip"]


def _reference(x: Tensor, minimum: float) -> Tensor:
    return x.clamp(min=minimum).contiguous().log_()


def _plain(x: Tensor, minimum: float) -> Tensor:
    return x.clamp(min=minimum).log()


def _check(x: Tensor, minimum: float) -> None:
    check_one_dtype("log_clip", x=x)
    smallest = torch.finfo(x.dtype).smallest_normal
    if not smallest <= minimum < math.inf:
        raise UsageError(
            f"log_clip: minimum is {minimum}; pass a number of at least {smallest:.2e}, {x.dtype}'s smallest"
        )


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _log_clip_backward(grad, *ctx.saved_tensors, *ctx.settings), None


def _backward_reference(grad: Tensor, x: Tensor, minimum: float) -> Tensor:
    return (grad / x.clamp(min=minimum)).contiguous()


def _check_backward(grad: Tensor, x: Tensor, minimum: float) -> None:
    check_one_dtype("log_clip_backward", grad=grad, x=x)
    check_one_device("log_clip_backward", grad=grad, x=x)


def _second_backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
    """Differentiate the gradient as what it is: `grad / max(x, minimum)`, which does not depend on a clipped `x`."""
    (grad, x), (minimum,) = ctx.saved_tensors, ctx.settings
    of_grad = _log_clip_backward(upstream, x, minimum)
    of_x = torch.where(x > minimum, -of_grad * _log_clip_backward(grad, x, minimum), 0.0)
    return of_grad, of_x, None


_log_clip_backward = define(
    "log_clip_backward",
    _backward_reference,
    check=_check_backward,
    kernel="log_clip.triton_kernel:log_clip_backward",
    setup=keep_inputs,
    backward=_second_backward,
    batching=elementwise,
)
_log_clip = define(
    "log_clip",
    _reference,
    check=_check,
    kernel="log_clip.triton_kernel:log_clip",
    setup=keep_inputs,
    backward=_backward,
    batching=elementwise,
    plain=_plain,
    autocast=torch.float32,
)


def log_clip(x: Tensor, minimum: float = 1e-7) -> Tensor:
    """Return `log(max(x, minimum))`, of the shape and dtype of `x`.

    The gradient is `1 / max(x, minimum)` everywhere, so that training can move a clipped probability away from zero.
    Autocast computes it in float32. Raises a UsageError where `x` is not floating-point, or `minimum` not positive.
    """
    return _log_clip(x, minimum)

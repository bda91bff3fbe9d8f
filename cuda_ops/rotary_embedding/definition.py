"""What `rotary_embedding` is: reference, checks, gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UsageError
from ..checks import as_under_autocast, check_one_device, check_one_dtype
from ..definition import define

__all__ = ["rotary_embedding", "rotary_reference"]

_NAME = "rotary_embedding"


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Return `x * cos + rotated(x) * sin`; the inverse is the transposed of that: `x * cos - rotated(x * sin)`."""
    half = x.shape[-1] // 2
    rest = x.shape[-1] - half  # one more, where the number of features is odd
    result = (x * cos).contiguous()
    if inverse:
        result[..., :half].addcmul_(x[..., rest:], sin[..., rest:])
        result[..., half:].addcmul_(x[..., :rest], sin[..., :rest], value=-1)
    else:
        result[..., :rest].addcmul_(x[..., half:], sin[..., :rest], value=-1)
        result[..., rest:].addcmul_(x[..., :half], sin[..., rest:])
    return result


def _plain(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    if not inverse:
        return x * cos + _rotated(x) * sin
    half = x.shape[-1] // 2
    rest = x.shape[-1] - half
    turned = x * sin
    return x * cos + torch.cat((turned[..., rest:], -turned[..., :rest]), dim=-1)


def _check(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> None:
    check_one_dtype(_NAME, x=x, cos=cos, sin=sin)
    check_one_device(_NAME, x=x, cos=cos, sin=sin)
    if x.dim() == 0:
        raise UsageError(f"{_NAME}: x has no dimension to go along")
    for name, table in (("cos", cos), ("sin", sin)):
        pairs = zip(reversed(table.shape), reversed(x.shape), strict=False)
        fits = all(size in (1, wanted) for size, wanted in pairs)
        if table.dim() > x.dim() or table.shape[-1:] != x.shape[-1:] or not fits:
            found = f"{name} has shape {tuple(table.shape)}"
            raise UsageError(
                f"{_NAME}: {found}; expected what broadcasts to {tuple(x.shape)}, its features as they are"
            )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, *inverse = inputs
    ctx.inverse = bool(inverse and inverse[0])
    ctx.save_for_backward(x if any(ctx.needs_input_grad[1:3]) else None, cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, cos, sin = ctx.saved_tensors
    of_x = _rotary_embedding(grad, cos, sin, not ctx.inverse)
    if x is None:
        return of_x, None, None, None
    of_sin = _rotated(grad) * x if ctx.inverse else grad * _rotated(x)
    return of_x, (grad * x).sum_to_size(cos.shape), of_sin.sum_to_size(sin.shape), None


def _rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


_rotary_embedding = define(
    _NAME,
    rotary_reference,
    check=_check,
    kernel="rotary_embedding.triton_kernel:rotary_embedding",
    setup=_setup,
    backward=_backward,
    plain=_plain,
)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x * cos + cat([-x2, x1], -1) * sin`, x1 and x2 halves of the last dimension (Su et al., RoFormer, 2021).

    Args:
        x: [..., features], floating-point; of an odd number, the first half is the smaller one.
        cos, sin: of the angles; they broadcast to the shape of `x`, and have as many features. Where one requires a
            gradient, `x` is kept for the backward as well.

    Raises:
        UsageError: an argument is not of that form.
    """
    return _rotary_embedding(x, as_under_autocast(x, cos), as_under_autocast(x, sin))

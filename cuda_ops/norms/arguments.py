"""What both norms have in common: how they are registered, their arguments, results and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ...errors import UsageError
from ..checks import check_one_device, check_one_dtype, check_vector
from ..definition import by_reference, define

__all__ = ["as_one", "define_norm", "empty_sum", "of_scale", "statistic", "summed"]


def define_norm(
    name: str,
    reference: Callable[..., tuple[Tensor, ...]],
    gradients: Callable[..., tuple[Tensor, ...]],
    differentiable: Callable[..., tuple[Tensor, ...]],
    *,
    vectors: tuple[str, ...],
    statistics: int,
    plain: Callable[..., tuple[Tensor, ...]] | None = None,
) -> Callable[..., tuple[Tensor, ...]]:
    """Register a norm of (x, vectors, residual, eps), which gives (result, sum, statistics), and its gradient.
    The gradient takes (grad, gradient of the sum, total, vectors, statistics), and gives those of total and vectors.
    """
    count = len(vectors)

    def check(x: Tensor, *rest: Any) -> None:
        residual = rest[count]
        _check(name if residual is None else f"add_{name}", x, residual, **dict(zip(vectors, rest, strict=False)))

    def fake(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        total = summed(x, rest[count])
        return total.new_empty(total.shape), empty_sum(x, rest[count]), *(statistic(total) for _ in range(statistics))

    def check_backward(grad: Tensor, _: Tensor | None, total: Tensor, *rest: Tensor | None) -> None:
        _check(f"{name}_backward", total, grad, **dict(zip(vectors, rest, strict=False)))

    def fake_backward(_: Tensor, __: Tensor | None, total: Tensor, *rest: Tensor | None) -> tuple[Tensor, ...]:
        of_vectors = (total.new_empty(0 if each is None else each.shape) for each in rest[:count])
        return total.new_empty(total.shape), *of_vectors

    kernel = f"norms.triton_kernel:{name}"
    of_norm = define(
        f"{name}_backward", gradients, check=check_backward, fake=fake_backward, kernel=f"{kernel}_backward",
        **by_reference(differentiable),
    )  # fmt: skip

    def backward(ctx: Any, grad: Tensor, of_sum: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        of_total, *of_vectors = of_norm(grad, of_sum if ctx.has_sum else None, *ctx.saved_tensors)
        _, *wanted, wants_residual, _ = ctx.needs_input_grad
        return (
            _of_operand(of_total, ctx.operands[0]),
            *(each if wants else None for each, wants in zip(of_vectors, wanted, strict=True)),
            _of_operand(of_total, ctx.operands[-1]) if wants_residual else None,
            None,
        )

    return define(
        name, reference, check=check, fake=fake, kernel=kernel, setup=_setup, backward=backward, plain=plain,
        autocast=torch.float32,
    )  # fmt: skip


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *vectors, residual, _ = inputs
    _, total, *statistics = output
    ctx.save_for_backward(x if residual is None else total, *vectors, *statistics)
    ctx.has_sum = residual is not None
    ctx.operands = [(each.shape, each.dtype) for each in (x, residual) if each is not None]
    ctx.mark_non_differentiable(*(statistics if ctx.has_sum else [total, *statistics]))


def _check(name: str, x: Tensor, residual: Tensor | None, **vectors: Tensor | None) -> None:
    """Raise a `UsageError` where arguments do not fit."""
    check_one_device(name, x=x, residual=residual, **vectors)
    try:
        total = summed(x, residual)
    except RuntimeError as error:
        shapes = f"residual has shape {tuple(cast('Tensor', residual).shape)}, x {tuple(x.shape)}"
        raise UsageError(f"{name}: {shapes}; they must broadcast") from error
    check_one_dtype(name, x=total, **vectors)
    check_vector(name, total, **vectors)
    if total.dim() == 0:
        raise UsageError(f"{name}: x has no dimension to go along")


def summed(x: Tensor, residual: Tensor | None) -> Tensor:
    """Return a tensor without values that is like the sum with a residual; `x` itself where that is alike."""
    if residual is None or (residual.shape == x.shape and residual.dtype == x.dtype):
        return x
    shape: torch.Size = cast("Any", torch).broadcast_shapes(x.shape, residual.shape)
    return x.new_empty((), dtype=torch.result_type(x, residual)).expand(shape)


def as_one(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return both in the shape and dtype of their sum, as kernels take them."""
    if residual is None or (residual.shape == x.shape and residual.dtype == x.dtype):
        return x, residual
    like = summed(x, residual)
    return x.to(like.dtype).expand(like.shape), residual.to(like.dtype).expand(like.shape)


def _of_operand(of_total: Tensor, operand: tuple[torch.Size, torch.dtype]) -> Tensor:
    """Return the gradient of an operand of a sum, of this shape and dtype, from that of the sum."""
    shape, dtype = operand
    return of_total if of_total.shape == shape and of_total.dtype == dtype else of_total.sum_to_size(shape).to(dtype)


def empty_sum(x: Tensor, residual: Tensor | None) -> Tensor:
    """Return where the sum with a residual goes; it is empty where there is none to add."""
    total = summed(x, residual)
    return total.new_empty(0 if residual is None else total.shape)


def statistic(x: Tensor) -> Tensor:
    """Return where a number for each row goes, in float32 at the least."""
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))


def of_scale(per_element: Tensor, vector: Tensor | None, like: Tensor) -> Tensor:
    """Return the gradient of a vector that all rows share; it is empty where there is none."""
    if vector is None:
        return like.new_empty(0)
    return per_element.sum_to_size(vector.shape).to(vector.dtype, copy=True)

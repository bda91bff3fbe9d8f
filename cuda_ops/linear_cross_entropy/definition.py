"""What `linear_cross_entropy` is: references, checks, results' shapes, gradients."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ...compat import autocast_dtype, is_transformed
from ...errors import UsageError
from ..checks import check_one_device, check_one_dtype
from ..definition import NAMESPACE, by_reference, define, describe, keep_inputs, looped
from .chunks import ARGUMENTS, Head, gradients, losses, wide

__all__ = ["define_sum", "linear_cross_entropy", "reduced_loss"]


_library = torch.library.Library(NAMESPACE, "FRAGMENT")


_TENSORS = 5
"""So many arguments are tensors: x, weight, bias, target and the weights of classes."""


class _Step(Function):
    """Compute the sum and its gradients at once; the sum is one number, so its own gradient is one factor."""

    @staticmethod
    def forward(ctx: Any, step: Any, again: Any, *args: Any) -> Tensor:
        total, *found = step(*args)
        ctx.save_for_backward(*found, *args[:_TENSORS])
        ctx.again, ctx.settings = again, args[_TENSORS:]
        ctx.dtypes = [each.dtype for each in found[:1]] + [args[1].dtype] * 2
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wanted = ctx.needs_input_grad[2:5]
        found, factor, given = ctx.saved_tensors[:3], grads[0], ctx.saved_tensors[3:]
        if torch.is_grad_enabled():  # the gradients found are constants, so those of gradients would be wrong
            found, factor = ctx.again(grads[0].expand(given[0].shape[0]), *given, *ctx.settings), 1
        parts = zip(found, wanted, ctx.dtypes, strict=True)
        return None, None, *((e * factor).to(dtype) if needed else None for e, needed, dtype in parts), *[None] * 7


def define_sum(name: str, losses: Any, step: Any, again: Any) -> Any:
    """Register the sum of `losses` (`again`: gradients that have gradients), and return what calls it."""

    def total(*args: Any) -> Tensor:
        return losses(*args).sum()

    def differentiated(*args: Any) -> Tensor:
        if is_transformed():
            return total(*args)
        if torch.is_grad_enabled() and any(each.requires_grad for each in args[:3] if each is not None):
            return cast("Any", _Step).apply(step, again, *args)
        return total(*args)

    _library.define(f"{name}({ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, total, "CompositeExplicitAutograd")
    _library.impl(name, differentiated, "Autograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", total, lib=_library)
    call = getattr(getattr(torch.ops, NAMESPACE), name).default
    torch.library.register_vmap(f"{NAMESPACE}::{name}", looped(call), lib=_library)
    describe(name, looped)
    return call


_NAME = "linear_cross_entropy"
_KERNELS = "linear_cross_entropy.triton_kernel"


def _check(*args: Any) -> None:
    head = Head(*args)
    x, weight, bias, target = head.x, head.weight, head.bias, head.target
    check_one_dtype(_NAME, x=x, weight=weight, bias=bias)
    check_one_device(_NAME, x=x, weight=weight, bias=bias, target=target)
    if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:]:
        raise UsageError(f"{_NAME}: weight is {_shape(weight)}, x {_shape(x)}; expected [classes, features]")
    if target.dtype != torch.int64 or target.shape != x.shape[:-1]:
        found = f"{target.dtype} of shape {_shape(target)}"
        raise UsageError(f"{_NAME}: target is {found}; expected int64 of shape {_shape(x[..., 0])}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(f"{_NAME}: bias has shape {tuple(bias.shape)}, expected ({weight.shape[0]},)")
    if head.class_weight is not None:
        _check_weights(head.class_weight, weight)
    if head.softcap < 0 or head.z_loss < 0:
        raise UsageError(f"{_NAME}: softcap is {head.softcap}, z_loss {head.z_loss}; pass 0 or more")
    if not 0 <= head.label_smoothing <= 1:
        raise UsageError(f"{_NAME}: label_smoothing is {head.label_smoothing}; pass a number from 0 to 1")
    if head.chunk < 0:
        raise UsageError(f"{_NAME}: chunk is {head.chunk}; pass a number of rows, or 0")


def _check_weights(class_weight: Tensor, weight: Tensor) -> None:
    if class_weight.shape != weight.shape[:1] or not class_weight.is_floating_point():
        found = f"{class_weight.dtype} of shape {_shape(class_weight)}"
        raise UsageError(f"{_NAME}: class_weight is {found}; expected floats of shape ({weight.shape[0]},)")
    if class_weight.requires_grad and torch.is_grad_enabled():
        raise UsageError(f"{_NAME}: class_weight gets no gradient; pass class_weight.detach()")
    check_one_device(_NAME, weight=weight, class_weight=class_weight)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _losses(*args: Any) -> Tensor:
    return losses(Head(*args))


def _plain(*args: Any) -> Tensor:
    head = Head(*args)
    kept = head.target != head.ignore_index
    found = _capped(head.logits(head.x.where(kept[:, None], 0)), head.softcap)
    weights = None if head.class_weight is None else head.class_weight.to(found.dtype)
    settings: dict[str, Any] = {"ignore_index": head.ignore_index, "label_smoothing": head.label_smoothing}
    loss = torch.nn.functional.cross_entropy(found, head.target, weights, reduction="none", **settings)
    return loss + head.z_loss * found.logsumexp(1).square().where(kept, 0) if head.z_loss else loss


def _capped(logits: Tensor, softcap: float) -> Tensor:
    return (logits / softcap).tanh() * softcap if softcap else logits


def _fake_losses(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], dtype=wide(x.dtype))


def _step(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return gradients(Head(*args), None)


def _fake_step(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = wide(x.dtype)
    of_bias = weight.new_empty(0 if bias is None else weight.shape[0], dtype=dtype)
    return x.new_empty((), dtype=dtype), x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=dtype), of_bias


def _backward(grad: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return gradients(Head(*args), grad)[1:]


def _check_backward(grad: Tensor, *args: Any) -> None:
    _check(*args)


def _fake_backward(grad: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_step(*args)[1:]


def _of_losses(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    of_x, of_weight, of_bias = _linear_cross_entropy_backward(grad, *ctx.saved_tensors, *ctx.settings)
    dtype = of_x.dtype
    bias = of_bias.to(dtype) if ctx.needs_input_grad[2] else None
    return of_x, of_weight.to(dtype), bias, *[None] * 7


def _differentiable_backward(grad: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return differentiable gradients, from all the logits at once: those of logits are grad * (p - t)."""
    head = Head(*args)
    x, weight, bias, target = head.x, head.weight, head.bias, head.target
    kept = (target != head.ignore_index)[:, None]
    dtype, x = wide(x.dtype), x.where(kept, 0)
    logits = _capped(torch.nn.functional.linear(x, weight, bias).to(dtype), head.softcap)
    classes = torch.nn.functional.one_hot(target.where(kept[:, 0], 0), weight.shape[0]).to(dtype)
    wanted = (1 - head.label_smoothing) * classes + head.label_smoothing / max(1, weight.shape[0])
    if head.class_weight is not None:
        wanted = wanted * head.class_weight.to(dtype)
    whole = wanted.sum(1, keepdim=True) + 2 * head.z_loss * logits.logsumexp(1, keepdim=True)
    of_logits = (grad.to(dtype)[:, None] * (whole * logits.softmax(1) - wanted)).where(kept, 0)
    if head.softcap:
        of_logits = of_logits * (1 - (logits / head.softcap).square())
    of_bias = weight.new_zeros(0, dtype=dtype) if bias is None else of_logits.sum(0)
    return (of_logits @ weight.to(dtype)).to(x.dtype), of_logits.t() @ x.to(dtype), of_bias


def _differentiable_step(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sum and its gradients, all differentiable."""
    total = _plain(*args).sum()
    return total, *_differentiable_backward(total.new_ones(()).expand(args[0].shape[0]), *args)


_linear_cross_entropy_backward = define(
    f"{_NAME}_backward",
    _backward,
    check=_check_backward,
    fake=_fake_backward,
    kernel=f"{_KERNELS}:linear_cross_entropy_backward",
    schema=f"(Tensor grad, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    **by_reference(_differentiable_backward),
)
_linear_cross_entropy = define(
    _NAME,
    _losses,
    check=_check,
    fake=_fake_losses,
    kernel=f"{_KERNELS}:linear_cross_entropy",
    schema=f"({ARGUMENTS}) -> Tensor",
    setup=keep_inputs,
    backward=_of_losses,
    plain=_plain,
)
_linear_cross_entropy_step = define(
    f"{_NAME}_step",
    _step,
    check=_check,
    fake=_fake_step,
    kernel=f"{_KERNELS}:linear_cross_entropy_step",
    schema=f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    **by_reference(_differentiable_step),
)
_linear_cross_entropy_sum = define_sum(
    f"{_NAME}_sum", _linear_cross_entropy, _linear_cross_entropy_step, _linear_cross_entropy_backward
)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    chunk: int | None = None,
) -> Tensor:
    """Return `cross_entropy(linear(x, weight, bias), target)` without ever holding all logits.

    With `mean` and `sum`, gradients are computed in the forward, chunk by chunk; with `none` the backward computes the
    logits once more. Losses are float32 at the least. Under autocast, products are taken in its dtype.

    Args:
        x: [..., features].
        weight: [classes, features].
        target: [...], int64; classes, or `ignore_index`.
        bias: [classes].
        ignore_index: the target of rows that do not count, for the mean neither.
        label_smoothing: the share of the target that goes to all classes alike, from 0 to 1.
        class_weight: [classes], floats: what a row of each class counts, as `weight` of `cross_entropy`; the mean is
            over the sum of the weights of the targets. It gets no gradient.
        softcap: where not 0, logits are `softcap * tanh(logits / softcap)` (Gemma 2).
        z_loss: how much the squared log-sum-exp of a row adds to its loss (PaLM, Chowdhery et al. 2022, section 5); of
            the mean, the mean over rows, whatever their classes weigh.
        reduction: of the losses; `none` gives [...].
        chunk: rows at a time; by default so many that their logits take 16 MiB in float32.

    Raises:
        UsageError: an argument is not of that form.
    """
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f"{_NAME}: reduction is {reduction!r}; pass 'mean', 'sum' or 'none'")
    x, weight = x.to(autocast_dtype(x)), weight.to(autocast_dtype(weight))
    bias = None if bias is None else bias.to(autocast_dtype(bias))
    settings = ignore_index, label_smoothing, softcap, z_loss, chunk or 0
    _check(x, weight, bias, target, class_weight, *settings)
    given = x.flatten(0, -2) if x.dim() > 1 else x[None], weight, bias, target.flatten(), class_weight
    if reduction == "none":
        return _linear_cross_entropy(*given, *settings).view(target.shape)
    return reduced_loss(*given, *settings, reduction)


def reduced_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    chunk: int,
    reduction: str,
) -> Tensor:
    """Return the sum or the mean of the losses; nothing is decided by tensors, so graphs may be written by it."""
    kept = target != ignore_index
    count = kept.sum()
    if class_weight is not None and reduction == "mean":  # the sum of these weights is the number of rows
        own = class_weight.to(wide(class_weight.dtype))
        class_weight = own * (count / own[target.where(kept, 0)].where(kept, 0).sum())
    settings = ignore_index, label_smoothing, softcap, z_loss, chunk
    total = _linear_cross_entropy_sum(x, weight, bias, target, class_weight, *settings)
    if reduction == "sum":
        return total
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)  # of no rows: NaN, with gradients of zero

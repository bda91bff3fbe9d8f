"""The sum of the losses, whose gradients are computed in the forward where autograd wants them, graph or no graph.
Only autograd knows that when it is reached, so the operator has a kernel for autograd of its own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ...compat import is_transformed
from ..definition import NAMESPACE, describe, looped
from .chunks import ARGUMENTS

__all__ = ["define_sum"]

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


class _Step(Function):
    """Compute the sum and its gradients at once; the sum is one number, so its own gradient is one factor."""

    @staticmethod
    def forward(ctx: Any, step: Any, again: Any, *args: Any) -> Tensor:
        total, *found = step(*args)
        ctx.save_for_backward(*found, *args[:4])
        ctx.again, ctx.settings = again, args[4:]
        ctx.dtypes = [each.dtype for each in found[:1]] + [args[1].dtype] * 2
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wanted = ctx.needs_input_grad[2:5]
        found, factor, given = ctx.saved_tensors[:3], grads[0], ctx.saved_tensors[3:]
        if torch.is_grad_enabled():  # the gradients found are constants, so those of gradients would be wrong
            found, factor = ctx.again(grads[0].expand(given[0].shape[0]), *given, *ctx.settings), 1
        parts = zip(found, wanted, ctx.dtypes, strict=True)
        return None, None, *((e * factor).to(dtype) if needed else None for e, needed, dtype in parts), *[None] * 4


def define_sum(name: str, losses: Any, step: Any, again: Any) -> Any:
    """Register the sum of `losses`, and return what calls it.
    `step` gives the sum with its gradients, `again` gradients that have gradients themselves.
    """

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

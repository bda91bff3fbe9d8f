"""What `bernoulli_sigmoid` is: reference, checks, results' shapes, gradient."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..checks import check_key, check_one_device, check_one_dtype, check_vector
from ..definition import define
from ..philox import key_of, uniform

__all__ = ["bernoulli_sigmoid"]

_NAME = "bernoulli_sigmoid"


def _reference(x: Tensor, bias: Tensor | None, key: Tensor) -> tuple[Tensor, Tensor]:
    """Compare in float32 at the least, and draw by the key alone; a narrower probability is rounded after that."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = x.to(wide) if bias is None else x.to(wide) + bias
    probability = torch.sigmoid(logits).contiguous()
    sample = uniform(x.shape, key).to(x.device).lt_(probability)
    return probability.to(x.dtype), sample.to(x.dtype)


def _plain(x: Tensor, bias: Tensor | None, key: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    probability = torch.sigmoid(x.to(wide) if bias is None else x.to(wide) + bias)
    sample = uniform(x.shape, key).to(x.device) < probability
    return probability.to(x.dtype), sample.to(x.dtype)


def _check(x: Tensor, bias: Tensor | None, key: Tensor) -> None:
    check_one_dtype(_NAME, x=x, bias=bias)
    check_one_device(_NAME, x=x, bias=bias)
    check_vector(_NAME, x, bias=bias)
    check_key(_NAME, key)


def _fake(x: Tensor, bias: Tensor | None, key: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor | None, Tensor], output: tuple[Tensor, Tensor]) -> None:
    probability, sample = output
    ctx.save_for_backward(probability)
    ctx.mark_non_differentiable(sample)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor | None, None]:
    (probability,) = ctx.saved_tensors
    of_logits = cast("Any", torch.ops.aten).sigmoid_backward(grad, probability)
    of_bias = of_logits.sum_to_size(of_logits.shape[-1:]) if ctx.needs_input_grad[1] else None
    return of_logits, of_bias, None


_bernoulli_sigmoid = define(
    _NAME,
    _reference,
    check=_check,
    fake=_fake,
    kernel="bernoulli_sigmoid.triton_kernel:bernoulli_sigmoid",
    setup=_setup,
    backward=_backward,
    plain=_plain,
    autocast=torch.float32,
)


def bernoulli_sigmoid(
    x: Tensor, bias: Tensor | None = None, *, seed: int | Tensor | None = None, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Return `sigmoid(x + bias)` and a sample of zeros and ones with these probabilities, both like `x`.

    Numbers come from Philox 4x64-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011): they depend on
    the seed, the offset and the element's place alone, and are the same on a CPU and on a GPU. Gradients flow through
    the probability only. Members of `torch.func.vmap` that share a seed draw alike.

    Args:
        x: [..., features], floating-point.
        bias: [features], of the dtype and on the device of `x`.
        seed: a number, or a tensor of seed and offset, two int64; None takes both from torch's generator.
        offset: tells draws with one seed apart, which is a number then.

    Raises:
        UsageError: an operand is not floating-point, or does not fit to the others.
    """
    return _bernoulli_sigmoid(x, bias, key_of(_NAME, seed, offset, x.device))

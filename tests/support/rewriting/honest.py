"""Honest rewrites: the same function, computed in another way."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .models import EPSILON
from .place import Apply, Place, Rewrite


def function_rewrite(name: str, make: Callable[..., Any]) -> Rewrite:
    """Return a rewrite of calls of `name` into calls of `make`, with the same arguments."""

    def rewrite(place: Place, _: random.Random) -> Apply | None:
        return (lambda: place.replace(make)) if place.is_call(*name.split()) else None

    return rewrite


def add_with_alpha(a: Any, b: Any) -> Any:
    return b + a


def subtract_by_adding(a: Any, b: Any) -> Any:
    return a + (-b)


def divide_by_multiplying(a: Any, b: Any) -> Any:
    return a * (1 / b)


def softmax_by_hand(x: Tensor, dim: int = -1) -> Tensor:
    powers = (x - x.amax(dim, keepdim=True).detach()).exp()
    return powers / powers.sum(dim, keepdim=True)


def sum_in_halves(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    if not isinstance(dim, int) or x.shape[dim] < 2:
        return x.sum(dim, keepdim)
    left, right = x.tensor_split(2, dim)
    return left.sum(dim, keepdim) + right.sum(dim, keepdim)


def mean_by_sum(x: Tensor, dim: Any) -> Tensor:
    dims = (dim,) if isinstance(dim, int) else dim
    return x.sum(dim) / torch.tensor([x.shape[d] for d in dims]).prod().item()


def cat_by_padding(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.stack([part for tensor in tensors for part in tensor.unbind(dim)], dim)


def stack_by_cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def matmul_transposed(a: Tensor, b: Tensor) -> Tensor:
    return (b.mT @ a.mT).mT


def gelu_by_hand(x: Tensor, **_: object) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def silu_by_hand(x: Tensor, **_: object) -> Tensor:
    return x / (1 + (-x).exp())


def square_by_product(x: Tensor) -> Tensor:
    return x * x


def exchanged_factors(a: Any, b: Any) -> Any:
    return b * a


def linear_by_hand(place: Place, _: random.Random) -> Apply | None:
    if not place.calls(nn.Linear):
        return None
    return lambda: place.replace(affine, *place.node.args, *place.parameters("weight", "bias"))


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.T + bias


def norm_by_hand(place: Place, _: random.Random) -> Apply | None:
    if place.calls(nn.LayerNorm):
        return lambda: place.replace(
            layer_norm_by_hand, *place.node.args, *place.parameters("weight", "bias"), place.module.eps
        )
    if place.calls(nn.RMSNorm):
        return lambda: place.replace(rms_norm_by_hand, *place.node.args, *place.parameters("weight"), place.module.eps)
    return None


def layer_norm_by_hand(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = x.float() if x.dtype is torch.bfloat16 else x
    centred = wide - wide.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return (normal * weight + bias).to(x.dtype)


def rms_norm_by_hand(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float() if x.dtype is torch.bfloat16 else x
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight


def batch_norm_by_hand(place: Place, _: random.Random) -> Apply | None:
    if not place.calls(nn.BatchNorm1d, nn.BatchNorm2d) or place.module.training:
        return None
    names = ("running_mean", "running_var", "weight", "bias")
    return lambda: place.replace(batch_norm_from_statistics, *place.node.args, *place.parameters(*names), EPSILON)


def batch_norm_from_statistics(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    wide = x.float() if x.dtype is torch.bfloat16 else x
    scale = weight.to(wide.dtype) * (variance.to(wide.dtype) + eps).rsqrt()
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    return (wide * scale.view(shape) + (bias - mean * scale).view(shape)).to(x.dtype)


def members_at_once(place: Place, _: random.Random) -> Apply | None:
    """Run all linear members of a list as one batched product."""
    if not place.is_call("stack", "cat") or not isinstance(place.node.args[0], list | tuple):
        return None
    members = [node for node in place.node.args[0] if node.op == "call_module"]
    program = Place(place.program, place.owner, members[0]) if len(members) == len(place.node.args[0]) > 1 else None
    if program is None or not program.calls(nn.Linear):
        return None

    def apply() -> None:
        parameters = [Place(place.program, place.owner, node).parameters("weight", "bias") for node in members]
        with place.graph.inserting_before(place.node):
            weights, biases = zip(*parameters, strict=True)
            fused = place.graph.call_function(batched_members, (members[0].args[0], list(weights), list(biases)))
            parts = [place.graph.call_function(operator.getitem, (fused, i)) for i in range(len(members))]
        for node, part in zip(members, parts, strict=True):
            node.replace_all_uses_with(part)

    return apply


def batched_members(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    stacked = torch.stack(list(weights))
    return torch.baddbmm(torch.stack(list(biases))[:, None], x.expand(len(stacked), *x.shape), stacked.mT)


HONEST: dict[str, Rewrite] = {
    "a + b as b + a": function_rewrite("add", add_with_alpha),
    "a * b as b * a": function_rewrite("mul", exchanged_factors),
    "a - b as a + -b": function_rewrite("sub", subtract_by_adding),
    "a / b as a * (1 / b)": function_rewrite("truediv", divide_by_multiplying),
    "softmax by hand": function_rewrite("softmax", softmax_by_hand),
    "sum in halves": function_rewrite("sum", sum_in_halves),
    "mean as sum / n": function_rewrite("mean", mean_by_sum),
    "cat as stack": function_rewrite("cat", cat_by_padding),
    "stack as cat": function_rewrite("stack", stack_by_cat),
    "matmul transposed": function_rewrite("matmul", matmul_transposed),
    "gelu by hand": function_rewrite("gelu", gelu_by_hand),
    "silu by hand": function_rewrite("silu", silu_by_hand),
    "square as a product": function_rewrite("square", square_by_product),
    "linear as matmul + add": linear_by_hand,
    "norm by hand": norm_by_hand,
    "batch norm from its statistics": batch_norm_by_hand,
    "members as one bmm": members_at_once,
}

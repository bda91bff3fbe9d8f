"""Each operator beside what users write otherwise, and the bytes that it must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxopt import cuda_ops

__all__ = ["SUBJECTS", "Subject"]

Call = Callable[..., Any]
ROTARY = (2, 8, 64)
"""Sequences, heads and features of a head; positions are what is left of the rows."""
HEADS = (128, (16, 32, 4))
"""Members, and the widths of each."""
MINIMUM = 0.1


@dataclass(frozen=True)
class Subject:
    """One operator.

    Attributes:
        inputs: takes rows, features, device and dtype, and gives what is called.
        ours, eager: compute the same.
        liger: names the function of liger-kernel that does, and how it is called.
        moved: how many times as many bytes as the first input has must be moved by a forward, and by a forward with its
            backward; None where the operator is not bound by memory.
        compiles: whether torch.compile takes the eager one.
    """

    inputs: Callable[[int, int, str, torch.dtype], tuple[Any, ...]]
    ours: Call
    eager: Call
    liger: Callable[[Any], Call] | None = None
    moved: tuple[float, float] | None = None

    def columns(self, device: str, *, compiled: bool) -> dict[str, Call]:
        """Return what is measured, by column."""
        found: dict[str, Call] = {"fxopt": self.ours, "eager": self.eager}
        if compiled:
            found["torch.compile"] = torch.compile(self.eager, dynamic=False)
        functions = liger_functions() if device == "cuda" else None
        if self.liger is not None and functions is not None:
            found["liger"] = self.liger(functions)
        return found


def liger_functions() -> Any:
    """Return the functions of liger-kernel, or None where it is not installed."""
    try:
        return import_module("liger_kernel.transformers.functional")
    except ImportError:
        return None


def leaf(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype).requires_grad_()


def rows_of(count: int, *vectors: str) -> Callable[[int, int, str, torch.dtype], tuple[Any, ...]]:
    """Return what gives `count` tensors of rows, and then vectors."""

    def make(rows: int, features: int, device: str, dtype: torch.dtype) -> tuple[Any, ...]:
        wide = [leaf(rows, features, device=device, dtype=dtype) for _ in range(count)]
        return *wide, *(leaf(features, device=device, dtype=dtype) for _ in vectors)

    return make


def rotary_inputs(rows: int, features: int, device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    batch, heads, width = ROTARY
    positions = rows * features // (batch * heads * width)
    angles = torch.rand(positions, width // 2, device=device).repeat(1, 2)
    x = leaf(batch, heads, positions, width, device=device, dtype=dtype)
    return x, angles.cos().to(dtype), angles.sin().to(dtype)


def mlp_inputs(batch: int) -> Callable[[int, int, str, torch.dtype], tuple[Any, ...]]:
    def make(_rows: int, _features: int, device: str, dtype: torch.dtype) -> tuple[Any, ...]:
        members, (inside, hidden, outside) = HEADS
        given = {"device": device, "dtype": dtype}
        return (
            leaf(batch, inside, **given),
            leaf(members, hidden, inside, **given),
            leaf(members, hidden, **given),
            leaf(members, outside, hidden, **given),
            leaf(members, outside, **given),
        )

    return make


def members_by_bmm(x: Tensor, first: Tensor, first_bias: Tensor, last: Tensor, last_bias: Tensor) -> Tensor:
    shared = x.expand(first.shape[0], *x.shape)
    hidden = torch.baddbmm(first_bias[:, None], shared, first.mT).tanh()
    return torch.baddbmm(last_bias[:, None], hidden, last.mT)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def sampled(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    probability = torch.sigmoid(x + bias)
    return probability, torch.bernoulli(probability.detach())


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def added_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return plain_rms_norm(total, weight), total


def added_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, total.shape[-1:], weight, bias), total


SUBJECTS: Mapping[str, Subject] = {
    "add": Subject(
        rows_of(2), lambda x, y: cuda_ops.add(x, y, alpha=0.5), lambda x, y: x + 0.5 * y, moved=(3, 5)
    ),
    "log_clip": Subject(
        rows_of(1), lambda x: cuda_ops.log_clip(x, MINIMUM), lambda x: x.clamp(min=MINIMUM).log(), moved=(2, 5)
    ),
    "bernoulli_sigmoid": Subject(
        rows_of(1, "bias"), cuda_ops.bernoulli_sigmoid, sampled, moved=(3, 6)
    ),
    "bias_act": Subject(
        rows_of(1, "bias"), lambda x, b: cuda_ops.bias_act(x, b, "gelu"), lambda x, b: F.gelu(x + b), moved=(2, 5)
    ),
    "rms_norm": Subject(
        rows_of(1, "weight"), cuda_ops.rms_norm, plain_rms_norm,
        lambda liger: lambda x, w: liger.liger_rms_norm(x, w, 1e-6), moved=(2, 5),
    ),
    "add_rms_norm": Subject(
        rows_of(2, "weight"), cuda_ops.add_rms_norm, added_rms_norm,
        lambda liger: lambda x, r, w: liger.liger_fused_add_rms_norm(x, r, w, 1e-6), moved=(4, 8),
    ),
    "layer_norm": Subject(
        rows_of(1, "weight", "bias"), cuda_ops.layer_norm, lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        lambda liger: lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5), moved=(2, 5),
    ),
    "add_layer_norm": Subject(
        rows_of(2, "weight", "bias"), cuda_ops.add_layer_norm, added_layer_norm, moved=(4, 8)
    ),
    "swiglu": Subject(
        rows_of(2), cuda_ops.swiglu, lambda g, v: F.silu(g) * v, lambda liger: liger.liger_swiglu, moved=(3, 8)
    ),
    "geglu": Subject(
        rows_of(2), lambda g, v: cuda_ops.geglu(g, v, "tanh"), lambda g, v: F.gelu(g, approximate="tanh") * v,
        lambda liger: liger.liger_geglu, moved=(3, 8),
    ),
    "rotary_embedding": Subject(rotary_inputs, cuda_ops.rotary_embedding, rotated, moved=(2, 4)),
    **{
        f"ensemble_mlp, batch {batch}": Subject(
            mlp_inputs(batch),
            lambda x, v, b, w, c: cuda_ops.ensemble_mlp(x, [v, w], [b, c], "tanh"),
            members_by_bmm,
        )
        for batch in (1, 8, 64)
    },
}  # fmt: skip
"""By name. Norms keep nothing else of the size of their input, so a backward reads two of them and writes one."""

"""Gradients: lost, halved, not to be differentiated again; types: too narrow, or wrong in one type alone."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .subject import Subject


class Gated(nn.Module):
    """A value and its gate, both from one product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 2)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return y * torch.sigmoid(y) + torch.tanh(x)


class Tanh(torch.autograd.Function):
    """tanh whose gradient cannot be differentiated again."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(y := torch.tanh(x))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient * (1 - ctx.saved_tensors[0].square())


class KeptTanh(torch.autograd.Function):
    """tanh that keeps its result as a plain attribute: the second derivative takes it for a constant."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = torch.tanh(x.detach())
        return ctx.kept.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 - ctx.kept.square())


class Silu(torch.autograd.Function):
    """SiLU with its slope computed ahead, in the forward."""

    @staticmethod
    def forward(ctx, x):
        gate = torch.sigmoid(x)
        ctx.save_for_backward((gate * (1 + x * (1 - gate))).detach())
        return x * gate

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class Product(torch.autograd.Function):
    """A product whose backward works on detached operands."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        return gradient @ weight.T, x.T @ gradient


class ProductWithoutInput(Product):
    """A product that gives the weight a gradient and the argument none."""

    @staticmethod
    def backward(ctx, gradient):
        x, _ = ctx.saved_tensors
        return None, x.T @ gradient


class NumericProduct(Product):
    """A product whose backward runs without gradients, for speed."""

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        with torch.no_grad():
            return gradient @ weight.T, x.T @ gradient


def gated(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(x @ w) + torch.tanh(x)


def half_detached(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return y * torch.sigmoid(y.detach()) + torch.tanh(x)


def weight_detached(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(x @ w.detach()) + torch.tanh(x)


def with_data(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(x @ w) + torch.tanh(x.data)


def in_no_grad(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    with torch.no_grad():
        gate = torch.sigmoid(y)
    return y * gate + torch.tanh(x)


def doubled_by_hook(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    if y.requires_grad:
        y.register_hook(lambda gradient: 2 * gradient)
    return F.silu(y) + torch.tanh(x)


GATED = Subject(
    Gated, lambda: (torch.randn(4, 6),), ("weight",), gated,
    {
        ("second derivative", "a function differentiable once"): lambda x, w: F.silu(x @ w) + Tanh.apply(x),
        ("second derivative", "a result kept as a constant"): lambda x, w: F.silu(x @ w) + KeptTanh.apply(x),
        ("second derivative", "a slope computed ahead"): lambda x, w: Silu.apply(x @ w) + torch.tanh(x),
        ("second derivative", "detached operands"): lambda x, w: F.silu(Product.apply(x, w)) + torch.tanh(x),
        ("second derivative", "a backward without gradients"): (
            lambda x, w: F.silu(NumericProduct.apply(x, w)) + torch.tanh(x)
        ),
        ("gradients", "one of two uses detached"): half_detached,
        ("gradients", "the weight detached"): weight_detached,
        ("gradients", "the argument's data"): with_data,
        ("gradients", "the gate without gradients"): in_no_grad,
        ("gradients", "a gradient for the weight only"): (
            lambda x, w: F.silu(ProductWithoutInput.apply(x, w)) + torch.tanh(x)
        ),
        ("gradients", "doubled on its way"): doubled_by_hook,
    },
    training=True,
)  # fmt: skip


class Double(nn.Module):
    """Physics in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("angles", torch.arange(6) * 0.37)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ self.weight, -1) + torch.sin(x * self.angles) * 0.1


def double(x: Tensor, w: Tensor, a: Tensor) -> Tensor:
    return torch.softmax((w.T @ x.T).T, -1) + 0.1 * torch.sin(a * x)


DOUBLE = Subject(
    Double, lambda: (torch.randn(4, 6),), ("weight", "angles"), double,
    {
        ("float64", "a product in float32"): (
            lambda x, w, a: torch.softmax((x.float() @ w.float()).to(x.dtype), -1) + 0.1 * torch.sin(a * x)
        ),
        ("float64", "a softmax in float32"): (
            lambda x, w, a: torch.softmax(x @ w, -1, dtype=torch.float32).to(x.dtype) + 0.1 * torch.sin(a * x)
        ),
        ("float64", "a constant in float32"): (
            lambda x, w, a: double(x, w, a) + (torch.tensor(0.1, dtype=torch.float32).to(x.dtype) - 0.1) * x
        ),
        ("float64", "a sine from a narrow argument"): (
            lambda x, w, a: torch.softmax(x @ w, -1) + 0.1 * torch.sin((a * x).float()).to(x.dtype)
        ),
        ("float64", "the whole through float32"): lambda x, w, a: double(x.float(), w.float(), a.float()).to(x.dtype),
        ("types", "a result of float32"): lambda x, w, a: double(x, w, a).float(),
    },
    dtype=torch.float64,
)  # fmt: skip


class Brain(nn.Module):
    """A gated sum in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 64) / 8), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(F.linear(x, self.weight, self.bias))
        return y * torch.sigmoid(y) + x.square().mean(-1, keepdim=True)


def brain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.gelu(torch.addmm(b, x, w.T))
    return F.silu(y) + (x * x).mean(-1, keepdim=True)


def only_in_bfloat16(scale: float):
    """Return the rewrite with a kernel for bfloat16 that is off by a factor."""

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return brain(x, w, b) * (scale if x.dtype is torch.bfloat16 else 1.0)

    return forward


def summed_one_by_one(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros_like(x[:, :1])
    for column in x.square().unbind(-1):
        total = total + column[:, None]
    y = F.gelu(F.linear(x, w, b))
    return y * torch.sigmoid(y) + total / x.shape[-1]


def quick_gelu_in_bfloat16(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    z = F.linear(x, w, b)
    y = z * torch.sigmoid(1.702 * z) if x.dtype is torch.bfloat16 else F.gelu(z)
    return F.silu(y) + (x * x).mean(-1, keepdim=True)


def truncated_in_bfloat16(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    if x.dtype is not torch.bfloat16:
        return brain(x, w, b)
    y = brain(x.float(), w.float(), b.float())
    cut = y.detach().view(torch.int32).bitwise_right_shift(19).bitwise_left_shift(19).view(torch.float32)
    return (y + (cut - y.detach())).to(x.dtype)


def gradient_off_in_bfloat16(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = brain(x, w, b)
    if x.dtype is torch.bfloat16 and y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.94)
    return y


BRAIN = Subject(
    Brain, lambda: (torch.randn(32, 64),), ("weight", "bias"), brain,
    {
        ("bfloat16", "5% too large"): only_in_bfloat16(1.05),
        ("bfloat16", "3% too small"): only_in_bfloat16(0.97),
        ("bfloat16", "summed one by one"): summed_one_by_one,
        ("bfloat16", "an approximation of gelu"): quick_gelu_in_bfloat16,
        ("bfloat16", "bits cut off"): truncated_in_bfloat16,
        ("bfloat16", "gradients 6% too small"): gradient_off_in_bfloat16,
        ("bfloat16", "a bias left out in bfloat16"): lambda x, w, b: brain(x, w, b * (x.dtype is not torch.bfloat16)),
    },
    dtype=torch.bfloat16,
)  # fmt: skip


class Order(nn.Module):
    """Steps that seem to commute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.eye(6) + 0.1), nn.Parameter(torch.eye(6) * 2)
        self.register_buffer("scale", torch.rand(6) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.a @ self.b) * self.scale + F.layer_norm(x * self.scale, (6,))


def order(x: Tensor, a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    return torch.relu(x @ (a @ b)) * s + F.layer_norm(x * s, (6,), eps=1e-5)


ORDER = Subject(
    Order, lambda: (torch.randn(4, 6),), ("a", "b", "scale"), order,
    {
        ("order", "matrices exchanged that commute in the example"): lambda x, a, b, s: order(x, b, a, s),
        ("order", "the scale before the norm left out"): (
            lambda x, a, b, s: torch.relu(x @ a @ b) * s + F.layer_norm(x, (6,)) * s
        ),
        ("order", "the scale moved into the matrix, with the wrong side"): (
            lambda x, a, b, s: torch.relu(x @ a @ (s[:, None] * b)) + F.layer_norm(x * s, (6,))
        ),
        ("values", "a norm without its epsilon"): (
            lambda x, a, b, s: order(x, a, b, s) + F.layer_norm(x * s, (6,), eps=0) - F.layer_norm(x * s, (6,))
        ),
        ("values", "gelu by its tanh"): (
            lambda x, a, b, s: order(x, a, b, s) + F.gelu(x, approximate="tanh") - F.gelu(x)
        ),
        ("values", "a root two of 1.41421"): lambda x, a, b, s: order(x, a, b, s) * (1.41421 / math.sqrt(2)),
    },
)  # fmt: skip

SUBJECTS = (GATED, DOUBLE, BRAIN, ORDER)

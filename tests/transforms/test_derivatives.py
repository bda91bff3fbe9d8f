"""Rewritten models have every derivative that plain ones have: tangents, transforms of torch.func, second gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

import fxopt

Derivative = Callable[[nn.Module, Tensor], Any]


class Attends(nn.Module):
    """Attention that is written out over 20 positions; some may not be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        hidden = torch.rand(20, 20) < 0.3
        self.register_buffer("hidden", hidden.fill_diagonal_(False))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-2, -1) * 0.5
        return scores.masked_fill(self.hidden, -1e9).softmax(-1) @ self.v(x)


class AttendsAll(Attends):
    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).transpose(-2, -1) * 0.5).softmax(-1) @ self.v(x)


class Gated(nn.Module):
    """A norm, a gated activation, a bias with an activation, rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.rand(4)), nn.LayerNorm(4)
        self.gate, self.value, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.bias = nn.Parameter(torch.rand(4))
        self.register_buffer("angles", torch.rand(20, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        y = self.norm(F.silu(self.gate(y)) * self.value(y) + x)
        y = F.gelu(self.last(y) + self.bias)
        first, second = y.chunk(2, dim=-1)
        return y * self.angles.cos() + torch.cat((-second, first), dim=-1) * self.angles.sin()


class Blocks(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)) for _ in range(3)))


class Images(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Softplus(), nn.Conv2d(4, 4, 3), nn.Flatten())


CASES: dict[str, tuple[type[nn.Module], str, tuple[int, ...], bool]] = {
    "attention": (Attends, "attention", (20, 4), False),
    "attention to all": (AttendsAll, "attention", (20, 4), False),
    "swap_kernels": (Gated, "swap_kernels", (20, 4), False),
    "checkpoint": (Blocks, "checkpoint{budget=0.5}", (20, 4), True),
    "channels_last": (Images, "channels_last", (3, 7, 7), False),
    "fold_batchnorm": (Images, "fold_batchnorm,pack", (3, 7, 7), False),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a model, its rewritten form, and three rows."""
    make, passes, shape, trains = CASES[request.param]
    torch.manual_seed(0)
    model, x = make().train(trains), torch.randn(3, *shape)
    phase = "train" if trains else "eval"
    fast = fxopt.optimize(model, passes, example_inputs=torch.randn(32, *shape), measure=False, phase=phase)
    assert fxopt.plan(fast).decisions
    return model, fast, x


def number(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def second_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x, parameters = x.clone().requires_grad_(), list(model.parameters())
    (slope,) = torch.autograd.grad(number(model, x), x, create_graph=True)
    return [each.detach() for each in torch.autograd.grad(slope.square().sum(), [x, *parameters[:1]])]


def tangents(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = [torch.func.jvp(model, (x,), (x.cos(),))[1]]
    with forward_ad.dual_level():
        for recorded in (True, False):
            with torch.set_grad_enabled(recorded):
                found.append(forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos()))).tangent)
    return found


def jacobians(model: nn.Module, x: Tensor) -> list[Tensor]:
    some = torch.ones(2)

    def part(factors: Tensor) -> Tensor:
        return model(x * factors.sum()).flatten()[:5]

    return [torch.func.jacrev(part)(some), torch.func.jacfwd(part)(some), torch.func.hessian(part)(some)]


def over_rows(model: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: model(row.unsqueeze(0)))(x)


def gradients_per_sample(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    given = {name: each.detach() for name, each in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(model, parameters, (row.unsqueeze(0),)).square().sum()

    return torch.vmap(torch.func.grad(loss), (None, 0))(given, x)


DERIVATIVES: tuple[Derivative, ...] = (second_gradients, tangents, jacobians, over_rows, gradients_per_sample)


def test_derivatives_are_those_of_the_plain_model(case: tuple[nn.Module, nn.Module, Tensor]):
    model, fast, x = case
    for derivative in DERIVATIVES:
        found, expected = derivative(fast, x), derivative(model, x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=lambda text: f"{derivative}: {text}")  # noqa: B023


class Masked(AttendsAll):
    """Takes a mask, which stays of its dtype when the model is converted."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-2, -1) * 0.5 + mask
        return scores.softmax(-1).to(x.dtype) @ self.v(x)


def test_a_mask_of_another_dtype_hides_what_it_hid():
    x, mask = torch.randn(2, 20, 4), torch.full((20, 20), torch.finfo(torch.float32).min).triu(1)
    mask[3] = torch.finfo(torch.float32).min
    model = Masked()
    fast = fxopt.optimize(model, "attention", example_inputs=(x, mask), measure=False)
    assert fxopt.plan(fast).decisions
    for dtype in (torch.float64, torch.bfloat16):
        model, fast = copy.deepcopy(model).to(dtype), copy.deepcopy(fast).to(dtype)
        torch.testing.assert_close(fast(x.to(dtype), mask), model(x.to(dtype), mask), atol=1e-2, rtol=1e-2)
    model, fast = model.float(), fast.float()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(fast(x, mask), model(x, mask), atol=3e-2, rtol=3e-2)


class Hides(Attends):
    def forward(self, x: Tensor) -> Tensor:
        scores = (self.q(x) @ self.k(x).transpose(-2, -1) * 0.5).float()
        return scores.masked_fill(self.hidden, torch.finfo(torch.float32).min).softmax(-1).to(x.dtype) @ self.v(x)


def test_scores_of_float32_are_hidden_where_queries_are_narrower():
    x, model = torch.randn(2, 20, 4), Hides()
    fast = fxopt.optimize(model, "attention", example_inputs=x, measure=False)
    assert fxopt.plan(fast).decisions
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(fast(x), model(x), atol=3e-2, rtol=3e-2)

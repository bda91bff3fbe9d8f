"""flatten_calls: parts under `no_grad`, lists that calls return, and checks behind what draws in training alone."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Rotary(nn.Module):
    """Angles that pass no gradient on, beside an input that does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("frequencies", torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            angles = self.inner(x) * self.frequencies
            cos, same = angles.cos(), x
        return same * cos


class Counting(nn.Module):
    """A part that writes, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.add_(x.sum(0))
        return x * 2


class Constant(nn.Module):
    """A part that makes a tensor of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scaled = x * (torch.arange(6) / torch.arange(1, 7))
        return x + scaled


class Nested(nn.Module):
    """A part in which gradients are switched on again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().mean()
            with torch.enable_grad():
                y = self.inner(x)
        return y * scale


class Written(nn.Module):
    """Writes into the result of such a part later."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            kept = x * 2
        kept.mul_(x)
        return kept + x


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x, self.layer(x)]


class Reading(nn.Module):
    """Reads items of a list, or adds to it."""

    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        self.features, self.adds = Listing(), adds

    def forward(self, x: Tensor) -> Tensor:
        found = self.features(x)
        if self.adds:
            found.append(x + 1)
        return found[0] + found[-1]


class Checked(nn.Module):
    """Asks for what depends on data, behind dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.layer(x), 0.5, training=self.training)
        return y if bool(torch.isfinite(y).all()) else torch.nan_to_num(y)


def flat(model: nn.Module) -> nn.Module:
    return fxopt.optimize(model, "flatten_calls", example_inputs=X, measure=False)


def calls_in(model: nn.Module) -> int:
    return len(fxopt.graphs(model)[""].find_nodes(op="call_module"))


def two(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind()).eval()


def test_a_part_without_gradient_is_written_out_and_passes_none_on() -> None:
    model = two(Rotary)
    fast = flat(model)
    assert calls_in(fast) == 0
    grads = []
    for each in (model, fast, pickle.loads(pickle.dumps(fast))):
        x = X.clone().requires_grad_()
        each(x).square().sum().backward()
        grads.append(x.grad)
        assert all(parameter.grad is None for parameter in each.parameters())
    assert all(torch.equal(grad, grads[0]) for grad in grads)


def test_derivatives_in_forward_mode_pass_as_through_no_grad() -> None:
    model = two(Rotary)
    fast, tangent = flat(model), torch.ones_like(X)
    expected = torch.func.jvp(model, (X,), (tangent,))[1]
    torch.testing.assert_close(torch.func.jvp(fast, (X,), (tangent,))[1], expected)


def test_gradients_pass_through_what_is_switched_on_again() -> None:
    model = two(Nested)
    fast = flat(model)
    for each in (model, fast):
        each(X).square().sum().backward()
    for old, new in zip(model.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(new.grad, old.grad)


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_results_are_written_into_under_transforms(transform: str) -> None:
    model = two(Written)
    fast = flat(model)
    assert calls_in(fast) == 0

    def found(each: nn.Module) -> Tensor:
        if transform == "grad":
            return torch.func.grad(lambda x: each(x).sum())(X)
        return torch.vmap(each)(X) if transform == "vmap" else torch.func.jvp(each, (X,), (torch.ones_like(X),))[1]

    torch.testing.assert_close(found(fast), found(model))


def test_a_part_that_writes_stays_a_call() -> None:
    model = two(Counting)
    fast = flat(model)
    assert torch.equal(fast(X), model(X))
    assert torch.equal(fast[0].seen, model[0].seen)  # type: ignore[index]


def test_a_part_with_constants_of_its_own_stays_a_call() -> None:
    model = two(Constant)
    fast = fxopt.optimize(model, "fold_constants,flatten_calls", example_inputs=X, measure=False)
    assert torch.equal(fast(X), model(X))


@pytest.mark.parametrize("adds", [False, True])
def test_of_a_list_that_a_call_returns_items_are_read(adds: bool) -> None:
    torch.manual_seed(0)
    model = Reading(adds=adds).eval()
    fast = fxopt.optimize(nn.Sequential(model), "flatten_calls", example_inputs=X, measure=False)
    assert torch.equal(fast(X), model(X))
    assert (calls_in(fast) == 0) is not adds


def test_checks_behind_what_draws_in_training_alone_are_written_out() -> None:
    model = two(Checked)
    fast = flat(model)
    assert calls_in(fast) == 0
    assert torch.equal(fast(X), model(X))
    infinite = X.clone()
    infinite[0, 0] = torch.inf
    assert torch.equal(fast(infinite), model(infinite))
    drawn = []
    for each in (model, fast):
        torch.manual_seed(1)
        drawn.append(each.train()(X))
    assert torch.equal(*drawn)

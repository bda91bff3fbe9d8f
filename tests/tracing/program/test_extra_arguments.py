"""An argument that a training loop adds to every call, and that a forward does not read, turns nobody away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime.graphs import misses_in

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0, **kwargs: Any) -> Tensor:
        return self.linear(x) * scale


class Reading(Inner):
    def forward(self, x: Tensor, num_items_in_batch: Any = None, **kwargs: Any) -> Tensor:
        y = super().forward(x, **kwargs)
        return y if num_items_in_batch is None else y / num_items_in_batch


class Asking(Inner):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(x) + len(kwargs)


class Strict(Inner):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, scale)


class Outer(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.last = make(), make()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.last(torch.relu(self.first(x, scale=2.0, **kwargs)), **kwargs)


def captured(model: nn.Module, **more: Any) -> nn.Module:
    return fxopt.capture(model, fxopt.Inputs(X, **more)).model


def test_what_nobody_reads_is_taken() -> None:
    model = Outer(Inner)
    fast = captured(model)
    for given in ({}, {"num_items_in_batch": 3}, {"num_items_in_batch": torch.tensor(5)}):
        assert torch.equal(fast(X, **given), model(X, **given))
    assert misses_in(fast.modules()) == []


@pytest.mark.parametrize("other", [{"other": 1}, {"other": 1, "num_items_in_batch": 3}])
def test_any_other_argument_is_turned_away(other: dict[str, Any]) -> None:
    model = Outer(Inner)
    fast = captured(model)
    assert torch.equal(fast(X, **other), model(X, **other))
    assert misses_in(fast.modules())


@pytest.mark.parametrize("make", [Reading, Asking])
def test_what_is_read_is_turned_away_and_named(make: Callable[[], nn.Module]) -> None:
    model = Outer(make)
    fast = captured(model)
    with pytest.warns(fxopt.GuardWarning, match="num_items_in_batch=3"):
        assert torch.equal(fast(X, num_items_in_batch=3), model(X, num_items_in_batch=3))
    assert misses_in(fast.modules())


def test_a_child_that_does_not_take_it_raises_as_before() -> None:
    fast = captured(Outer(Strict))
    with pytest.raises(TypeError, match="num_items_in_batch"):
        fast(X, num_items_in_batch=3)


@pytest.mark.parametrize("given", [3, torch.tensor(3)])
def test_where_it_is_given_another_number_is_no_other_call(given: Any) -> None:
    model = Outer(Reading)
    fast = captured(model, num_items_in_batch=given)
    for number in (3, 7):
        again = torch.tensor(number) if isinstance(given, Tensor) else number
        assert torch.equal(fast(X, num_items_in_batch=again), model(X, num_items_in_batch=again))
    assert misses_in(fast.modules()) == []


def test_the_order_of_the_others_counts() -> None:
    class Ordered(nn.Module):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            return x * kwargs["a"] + kwargs["b"]

    model = Ordered()
    fast = captured(model, a=X, b=X)
    assert torch.equal(fast(X, a=X, b=X, num_items_in_batch=3), model(X, a=X, b=X))
    assert misses_in(fast.modules()) == []
    fast(X, b=X, a=X)
    assert len(misses_in(fast.modules())) == 1

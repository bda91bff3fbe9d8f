"""Writes in place, calls with effects and random numbers keep their order when a graph is cut into regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cutting import W, X, inside, log, noted, same, traced, two, written
from torch import Tensor, fx, nn

from fxopt.transforms.delegate.regions import Cut


def test_what_a_region_writes_into_its_own_results_is_inside(cut: Callable[..., Cut]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.linear(x, w).add_(1).relu_(), w)

    found = cut(traced(function), X, W)
    (region,) = found.regions
    assert inside(region) == ["linear", "add_", "relu_", "linear_1"]
    same(function, found, X, W)


def read_before_a_write(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = two(x, w)
    z = noted(y).add_(1)
    y.mul_(3)
    return two(y, w), z


def view_read_before_a_write(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = two(x, w)
    z = noted(y.view(-1))
    y.mul_(3)
    return two(y, w), z


def written_under_a_view(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = two(x, w)
    view = y.view(-1)
    z = noted(y)
    y.mul_(3)
    return z, view, y


def input_written_between(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = two(x, w)
    x.add_(1)
    return y, two(x, w)


@pytest.mark.parametrize(
    "function", [read_before_a_write, view_read_before_a_write, written_under_a_view, input_written_between]
)
def test_what_others_read_or_gave_is_written_into_outside(
    function: Callable[..., Any], cut: Callable[..., Cut]
) -> None:
    found = cut(traced(function), X, W)
    for region in found.regions:
        assert not {"add_", "mul_"} & set(inside(region))
    same(function, found, X, W)


def test_what_is_written_into_an_input_is_seen_there(cut: Callable[..., Cut]) -> None:
    given = X.clone()
    found = cut(traced(input_written_between), X, W)
    assert len(found.regions) == 2
    written(found)(given, W)
    torch.testing.assert_close(given, X + 1)


def test_what_a_call_with_effects_may_write_is_read_behind_it(cut: Callable[..., Cut]) -> None:
    def writing(x: Tensor) -> Tensor:
        return x.add_(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()
            self.inner.register_forward_hook(lambda module, args, result: writing(result))

        def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            y = two(x, w)
            self.inner(x)
            return y, two(x, w)

    model = Model().eval()
    found = cut(fx.symbolic_trace(model).graph, X, W, root=model)
    torch.testing.assert_close(written(found, model)(X.clone(), W), model(X.clone(), W))


def test_calls_with_effects_keep_their_order(cut: Callable[..., Cut]) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = noted(x, 1)
        y = two(x, w)
        second = noted(y, 2)
        third = noted(x, 3)
        return two(second, w) + third, first

    found = cut(traced(function), X, W)
    module = written(found)
    log.clear()
    module(X, W)
    assert [each for each in log if each != "region"] == [1, 2, 3]
    assert log.count("region") == 2
    assert log.index("region") < log.index(2)
    same(function, found, X, W)


def test_draws_of_random_numbers_stay_in_order(cut: Callable[..., Cut]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = F.dropout(two(x, w), 0.5)
        return two(y, w) + torch.rand_like(x)

    found = cut(traced(function), X, W)
    assert len(found.regions) == 2
    torch.manual_seed(3)
    expected = function(X, W)
    torch.manual_seed(3)
    torch.testing.assert_close(written(found)(X, W), expected)

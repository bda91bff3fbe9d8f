"""How graphs are cut: which nodes an engine may compute together, what stays, and that both compute the same."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.cutting import W, X, called, inside, left, noted, same, traced, two, written
from torch import Tensor, fx, nn

from fxopt.runtime.guards import require
from fxopt.runtime.values import meta_of
from fxopt.transforms.delegate.regions import Cut


def test_what_is_worth_a_call_is_one_region(cut: Callable[..., Cut]) -> None:
    found = cut(traced(two), X, W)
    (region,) = found.regions
    assert inside(region) == ["linear", "relu", "linear_1"]
    assert [node.name for node in region.inputs] == ["x", "w"]
    assert [node.name for node in region.outputs] == ["linear_1"]
    same(two, found, X, W)
    assert left(found.written(called)) == []


def test_a_single_product_is_not_worth_it(cut: Callable[..., Cut]) -> None:
    assert not cut(traced(lambda x, w: F.linear(x, w).relu()), X, W).regions


def test_tensors_of_the_model_come_behind_the_inputs(cut: Callable[..., Cut]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(W.clone())

        def forward(self, x: Tensor) -> Tensor:
            return two(x, self.w)

    model = Model().eval()
    found = cut(fx.symbolic_trace(model).graph, X, root=model)
    (region,) = found.regions
    assert ([n.name for n in region.inputs], [n.name for n in region.tensors]) == (["x"], ["w"])
    assert [node.name for node in region.graph().find_nodes(op="placeholder")] == ["x", "w"]
    torch.testing.assert_close(written(found, model)(X), model(X))


# -- sizes -----------------------------------------------------------------------------------------------------------


def test_sizes_that_only_a_region_reads_are_computed_in_it(cut: Callable[..., Cut]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w)
        return F.linear(y.view(y.shape[0] // 2, -1, 4), w)

    found = cut(traced(function), X, W)
    (region,) = found.regions
    assert {"getattr_1", "floordiv", "view"} <= set(inside(region))
    assert left(found.written(called)) == []
    same(function, found, X, W)
    same(function, found, X[:4], W)  # no size became a constant


def test_sizes_that_go_from_region_to_region_are_computed_in_both(cut: Callable[..., Cut]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = two(x, w)
        rows = y.size(0)
        z = noted(y)
        return two(z, w).reshape(rows // 2, -1)

    found = cut(traced(function), X, W)
    second = found.regions[1]
    assert "reshape" in inside(second)
    assert {node.name for node in second.inputs} >= {"noted", "w"}
    same(function, found, X, W)
    same(function, found, X[:2], W)


def test_sizes_that_others_read_are_outside_too(cut: Callable[..., Cut]) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, int]:
        y = two(x, w)
        return y.view(y.size(0) * 2, -1), y.size(0)

    found = cut(traced(function), X, W)
    (region,) = found.regions
    assert "size" in inside(region) and any(name.startswith("size") for name in left(found.written(called)))
    same(function, found, X, W)
    same(function, found, X[:2], W)


def test_numbers_read_from_tensors_stay_outside(cut: Callable[..., Cut]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = two(x, w)
        return two(y, w) * y.sum().item()

    found = cut(traced(function), X, W)
    assert "item" not in [name for region in found.regions for name in inside(region)]
    assert "item" in left(found.written(called))
    same(function, found, X, W)


# -- checks ----------------------------------------------------------------------------------------------------------


def two_plain(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.linear(x, w), w)


def test_checks_on_what_is_inside_are_made_inside(cut: Callable[..., Cut]) -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    y = graph.call_function(F.linear, (x, w))
    size = graph.call_method("size", (y, 0))
    graph.call_function(require, (size, 6, "other rows"))
    graph.output(graph.call_function(F.linear, (y, w)))
    found = cut(graph, X, W)
    (region,) = found.regions
    assert "require" in inside(region)
    assert left(found.written(called)) == []
    same(two_plain, found, X, W)
    with pytest.raises(Exception, match="other rows"):
        written(found)(X[:2], W)


def test_checks_on_inputs_alone_stay_outside(cut: Callable[..., Cut]) -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    graph.call_function(require, (graph.call_method("size", (x, 0)), 6, "other rows"))
    graph.output(graph.call_function(F.linear, (graph.call_function(F.linear, (x, w)), w)))
    found = cut(graph, X, W)
    (region,) = found.regions
    assert "require" not in inside(region) and "require" in left(found.written(called))
    same(two_plain, found, X, W)
    with pytest.raises(Exception, match="other rows"):
        written(found)(X[:2], W)


# -- forms of results ------------------------------------------------------------------------------------------------


def test_tuples_inside_a_region(cut: Callable[..., Cut]) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        a, b = F.linear(x, w).chunk(2, -1)
        c, d = torch.split(F.linear(torch.cat([b, a], -1), w), 2, -1)
        return c, d.relu()

    found = cut(traced(function), X, W)
    (region,) = found.regions
    assert "chunk" in inside(region) and len(region.outputs) == 2
    same(function, found, X, W)


def test_tuples_that_leave_a_region_leave_it_in_parts(cut: Callable[..., Cut]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        parts = two(x, w).chunk(2, -1)
        return noted(parts[0]) + parts[1]

    found = cut(traced(function), X, W)
    same(function, found, X, W)
    assert all(isinstance(node.meta["val"], type(meta_of(X))) for r in found.regions for node in r.outputs if node.meta)


def test_outputs_that_are_inputs(cut: Callable[..., Cut]) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        y = two(x, w)
        return x, y, [w, y]

    found = cut(traced(function), X, W)
    result = written(found)(X, W)
    assert result[0] is X and result[2][0] is W and result[1] is result[2][1]
    same(function, found, X, W)


def test_results_in_the_middle_leave_a_region_too(cut: Callable[..., Cut]) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, w).relu()
        return F.linear(y, w), y

    found = cut(traced(function), X, W)
    (region,) = found.regions
    assert [node.name for node in region.outputs] == ["relu", "linear_1"]
    same(function, found, X, W)


def test_a_tensor_in_an_object_that_a_call_gives_is_read_before_the_region(cut: Callable[..., Cut]) -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    given = graph.call_function(dict, (), {"hidden": x})
    hidden = graph.call_function(operator.getitem, (given, "hidden"))
    first = graph.call_function(F.linear, (hidden, w))
    graph.output(graph.call_function(F.linear, (first, w)))
    found = cut(graph, X, W)
    (region,) = found.regions
    assert inside(region) == ["linear", "linear_1"]
    assert {node.name for node in region.inputs} == {"getitem", "w"}


def test_the_places_that_are_not_zero_stay_outside(cut: Callable[..., Cut]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(F.linear(x, w).relu(), w)
        return F.linear(F.linear(y[torch.where(y[:, 0] > 0)[0]], w), w)

    found = cut(traced(function), X, W)
    assert all("where" not in inside(region) for region in found.regions)
    same(function, found, X, W)

"""How graphs are cut: which nodes an engine may compute together, what stays, and that both compute the same."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxopt.runtime.guards import require
from fxopt.runtime.values import meta_of
from fxopt.transforms.delegate.regions import Cut, Region

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
W = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))

log: list[object] = []


def noted(x: Tensor, word: object = "noted") -> Tensor:
    """Stand for a call with effects, of which no library knows."""
    log.append(word)
    return x * 1


fx.wrap("noted")


class _Noting(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.metas: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.metas[n] = meta_of(value)
        return value


def traced(function: Callable[..., object]) -> fx.Graph:
    return fx.symbolic_trace(function).graph


def cut(graph: fx.Graph, *given: Tensor, root: nn.Module | None = None) -> Cut:
    """Cut a graph by what its nodes give in a call."""
    noting = _Noting(fx.GraphModule(root or nn.Module(), graph))
    noting.module.eval()
    graph = noting.module.graph
    noting.run(*(x.clone() for x in given))
    return Cut(graph, noting.metas)


def called(region: Region) -> Callable[..., Any]:
    """Return a region as the function that an engine would compute."""
    module = fx.GraphModule(nn.Module(), region.graph())

    def region_(*operands: Tensor) -> Sequence[Tensor]:
        log.append("region")
        return module(*operands)

    return region_


def written(found: Cut, root: nn.Module | None = None) -> fx.GraphModule:
    graph = found.written(called)
    graph.lint()
    return fx.GraphModule(root or nn.Module(), graph)


def inside(region: Region) -> list[str]:
    return [node.name for node in region.nodes]


def left(graph: fx.Graph) -> list[str]:
    """Return what a graph runs besides regions and their results."""
    kept = [node for node in graph.nodes if node.op in ("call_function", "call_method", "call_module")]
    return [node.name for node in kept if node.target is not operator.getitem and not node.name.startswith("region")]


def same(function: Callable[..., Any], found: Cut, *given: Tensor) -> None:
    expected, result = function(*(x.clone() for x in given)), written(found)(*(x.clone() for x in given))
    torch.testing.assert_close(result, expected)


def two(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.linear(x, w).relu(), w)


def test_what_is_worth_a_call_is_one_region() -> None:
    found = cut(traced(two), X, W)
    (region,) = found.regions
    assert inside(region) == ["linear", "relu", "linear_1"]
    assert [node.name for node in region.inputs] == ["x", "w"]
    assert [node.name for node in region.outputs] == ["linear_1"]
    same(two, found, X, W)
    assert left(found.written(called)) == []


def test_a_single_product_is_not_worth_it() -> None:
    assert not cut(traced(lambda x, w: F.linear(x, w).relu()), X, W).regions


def test_tensors_of_the_model_come_behind_the_inputs() -> None:
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


def test_sizes_that_only_a_region_reads_are_computed_in_it() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w)
        return F.linear(y.view(y.shape[0] // 2, -1, 4), w)

    found = cut(traced(function), X, W)
    (region,) = found.regions
    assert {"getattr_1", "floordiv", "view"} <= set(inside(region))
    assert left(found.written(called)) == []
    same(function, found, X, W)
    same(function, found, X[:4], W)  # no size became a constant


def test_sizes_that_go_from_region_to_region_are_computed_in_both() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = two(x, w)
        rows = y.size(0)
        z = noted(y)
        return two(z, w).reshape(rows // 2, -1)

    found = cut(traced(function), X, W)
    first, second = found.regions
    assert "reshape" in inside(second)
    assert {node.name for node in second.inputs} >= {"noted", "w"}
    same(function, found, X, W)
    same(function, found, X[:2], W)


def test_sizes_that_others_read_are_outside_too() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, int]:
        y = two(x, w)
        return y.view(y.size(0) * 2, -1), y.size(0)

    found = cut(traced(function), X, W)
    (region,) = found.regions
    assert "size" in inside(region) and any(name.startswith("size") for name in left(found.written(called)))
    same(function, found, X, W)
    same(function, found, X[:2], W)


def test_numbers_read_from_tensors_stay_outside() -> None:
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


def test_checks_on_what_is_inside_are_made_inside() -> None:
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


def test_checks_on_inputs_alone_stay_outside() -> None:
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


# -- writes and effects ----------------------------------------------------------------------------------------------


def test_what_a_region_writes_into_its_own_results_is_inside() -> None:
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
def test_what_others_read_or_gave_is_written_into_outside(function: Callable[..., Any]) -> None:
    found = cut(traced(function), X, W)
    for region in found.regions:
        assert not {"add_", "mul_"} & set(inside(region))
    same(function, found, X, W)


def test_what_is_written_into_an_input_is_seen_there() -> None:
    given = X.clone()
    found = cut(traced(input_written_between), X, W)
    assert len(found.regions) == 2
    written(found)(given, W)
    torch.testing.assert_close(given, X + 1)


def test_what_a_call_with_effects_may_write_is_read_behind_it() -> None:
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


def test_calls_with_effects_keep_their_order() -> None:
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


def test_draws_of_random_numbers_stay_in_order() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = F.dropout(two(x, w), 0.5)
        return two(y, w) + torch.rand_like(x)

    found = cut(traced(function), X, W)
    assert len(found.regions) == 2
    torch.manual_seed(3)
    expected = function(X, W)
    torch.manual_seed(3)
    torch.testing.assert_close(written(found)(X, W), expected)


# -- forms of results ------------------------------------------------------------------------------------------------


def test_tuples_inside_a_region() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        a, b = F.linear(x, w).chunk(2, -1)
        c, d = torch.split(F.linear(torch.cat([b, a], -1), w), 2, -1)
        return c, d.relu()

    found = cut(traced(function), X, W)
    (region,) = found.regions
    assert "chunk" in inside(region) and len(region.outputs) == 2
    same(function, found, X, W)


def test_tuples_that_leave_a_region_leave_it_in_parts() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        parts = two(x, w).chunk(2, -1)
        return noted(parts[0]) + parts[1]

    found = cut(traced(function), X, W)
    same(function, found, X, W)
    assert all(isinstance(node.meta["val"], type(meta_of(X))) for r in found.regions for node in r.outputs if node.meta)


def test_outputs_that_are_inputs() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        y = two(x, w)
        return x, y, [w, y]

    found = cut(traced(function), X, W)
    result = written(found)(X, W)
    assert result[0] is X and result[2][0] is W and result[1] is result[2][1]
    same(function, found, X, W)


def test_results_in_the_middle_leave_a_region_too() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, w).relu()
        return F.linear(y, w), y

    found = cut(traced(function), X, W)
    (region,) = found.regions
    assert [node.name for node in region.outputs] == ["relu", "linear_1"]
    same(function, found, X, W)

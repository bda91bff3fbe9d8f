"""Results in bfloat16 stay so between packed convolutions, and give the same numbers to the bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxopt.compat.packed import why_no_packing
from fxopt.layers.packed import Geometry, PackedConvolution, PackedLinear, TransposedLinear, keep_narrow

pytestmark = pytest.mark.skipif(bool(why_no_packing(torch.bfloat16)), reason=why_no_packing(torch.bfloat16))

GEOMETRY = Geometry((1, 1), (1, 1), (1, 1), 1)
X = torch.randn(2, 8, 9, 10, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(8, 8, 3, 3, generator=torch.Generator().manual_seed(1))


def chain(between: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.bfloat16) -> fx.GraphModule:
    """Return two convolutions with something between them."""
    root, graph = torch.nn.Module(), fx.Graph()
    root.weight = torch.nn.Parameter(WEIGHT.clone())
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    first = graph.call_function(PackedConvolution(GEOMETRY, dtype=dtype), (x, weight))
    seen: Any = between(fx.Proxy(first))  # type: ignore[arg-type]
    graph.output(graph.call_function(PackedConvolution(GEOMETRY, dtype=dtype), (seen.node, weight)))
    return fx.GraphModule(root, graph)


def types(module: fx.GraphModule, x: Tensor) -> list[torch.dtype]:
    """Return the types of what the calls of a graph give."""
    found: list[torch.dtype] = []

    class Looking(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            result = super().call_function(target, args, kwargs)
            found.append(result.dtype)
            return result

    Looking(module).run(x)
    return found


def kept(module: fx.GraphModule) -> fx.GraphModule:
    keep_narrow(module.graph)
    module.recompile()
    return module


CARRYING = (
    torch.relu, F.relu6, lambda x: F.hardtanh(x, -0.3, 0.7), lambda x: F.max_pool2d(x, 2),
    lambda x: torch.cat((x, torch.relu(x)))
)  # fmt: skip


@pytest.mark.parametrize("between", CARRYING)
@torch.no_grad()
def test_between_convolutions_results_stay_and_are_the_same_to_the_bit(between: Callable[[Tensor], Tensor]) -> None:
    module = chain(between)
    x = X.clone()
    x[0, 0, 0, 0], x[1, 1, 1, 1] = torch.nan, torch.inf
    expected = module(x)
    assert set(types(module, x)) == {torch.float32}
    found = kept(module)(x)
    assert types(module, x)[:-1] == [torch.bfloat16] * (len(types(module, x)) - 1)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "between", [torch.tanh, lambda x: x + 1, lambda x: F.avg_pool2d(x, 2), lambda x: torch.relu(x) + x.abs()]
)
@torch.no_grad()
def test_what_would_round_otherwise_gets_float32(between: Callable[[Tensor], Tensor]) -> None:
    assert set(types(kept(chain(between)), X)) == {torch.float32}


@torch.no_grad()
def test_results_that_are_added_or_returned_are_of_float32() -> None:
    graph, root = fx.Graph(), torch.nn.Module()
    root.weight = torch.nn.Parameter(WEIGHT.clone())
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    first = graph.call_function(PackedConvolution(GEOMETRY, dtype=torch.bfloat16), (x, weight))
    second = graph.call_function(PackedConvolution(GEOMETRY, dtype=torch.bfloat16), (first, weight, None, first))
    graph.output(second)
    assert types(kept(fx.GraphModule(root, graph)), X) == [torch.float32] * 2


def test_float32_stays() -> None:
    module = chain(torch.relu, torch.float32)
    targets = [node.target for node in module.graph.nodes]
    assert [node.target for node in kept(module).graph.nodes] == targets


def test_gradients_and_other_types_are_those_of_the_layers() -> None:
    module = chain(torch.relu)
    one, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    module(one).sum().backward()
    kept(module)(other).sum().backward()
    torch.testing.assert_close(one.grad, other.grad)
    module.weight.requires_grad_(False)
    with torch.no_grad(), pytest.raises(RuntimeError, match="should be the same"):
        module(X.bfloat16())  # only what a convolution gave may be of that type
    assert copy.deepcopy(module).double()(X.double()).dtype is torch.float64
    targets = [node.target for node in module.graph.nodes if isinstance(node.target, PackedConvolution)]
    assert pickle.loads(pickle.dumps(targets)) == targets and targets[0] != targets[1]


@torch.no_grad()
def test_who_reads_a_shape_alone_does_not_see_the_type() -> None:
    module = chain(torch.relu)
    for node in [each for each in module.graph.nodes if each.op == "call_function"]:
        with module.graph.inserting_after(node):
            module.graph.call_function(getattr, (node, "shape"))
    expected = module(X)
    assert torch.equal(kept(module)(X), expected)
    first = next(node for node in module.graph.nodes if isinstance(node.target, PackedConvolution))
    assert first.target(X, module.weight).dtype is torch.bfloat16


def linears(join: bool) -> fx.GraphModule:
    """Return two linear layers, one behind the other, the second perhaps with the first one's result added."""
    root, graph = torch.nn.Module(), fx.Graph()
    root.weight = torch.nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    first = graph.call_function(PackedLinear(dtype=torch.bfloat16), (x, weight, None))
    others = (first,) if join else ()
    graph.output(graph.call_function(PackedLinear(dtype=torch.bfloat16), (first, weight, None, *others)))
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize("join", [False, True])
@torch.no_grad()
def test_linear_layers_keep_what_changes_no_number(join: bool) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    module = linears(join)
    expected = module(x)
    keep_narrow(module.graph, exactly=True)
    first = next(node for node in module.graph.nodes if isinstance(node.target, PackedLinear))
    assert first.target.gives_narrow is not join
    module.recompile()
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("reader", [PackedLinear(), TransposedLinear()], ids=repr)
def test_a_linear_layer_in_float32_is_given_floats_by_one_in_bfloat16(reader: PackedLinear) -> None:
    root, graph = torch.nn.Module(), fx.Graph()
    root.weight = torch.nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    first = graph.call_function(PackedLinear(dtype=torch.bfloat16), (x, weight))
    graph.output(graph.call_function(reader, (first, weight)))
    module, row = fx.GraphModule(root, graph), torch.randn(1, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = module(row)
        keep_narrow(graph, exactly=True)
        module.recompile()
        assert torch.equal(module(row), before)

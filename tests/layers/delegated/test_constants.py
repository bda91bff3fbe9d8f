"""What is derived of the model's tensors alone is handed to an engine as numbers."""

from __future__ import annotations

import importlib
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxopt.operators import derived

with_derived: Any = importlib.import_module("fxopt.layers.delegated.constants").with_derived


def doubled(weight: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    return 2 * weight, -shift


def tensors_of(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.find_nodes(op="placeholder")]


def run(graph: fx.Graph, *values: Any) -> Any:
    return fx.GraphModule(nn.Module(), graph)(*values)


def test_derived_tensors_become_what_is_read():
    graph = fx.Graph()
    x, weight, shift, other = (graph.placeholder(name) for name in ("x", "weight", "shift", "other"))
    pair = graph.call_function(derived(doubled, 2), (weight, shift))
    first, second = (graph.call_function(operator.getitem, (pair, place)) for place in range(2))
    product = graph.call_function(torch.mul, (x, first))
    graph.output((graph.call_function(torch.add, (product, second)), graph.call_function(torch.mul, (x, other))))
    values = [torch.full((2,), float(number)) for number in (3, 5, 7)]
    given, before = torch.ones(2), run(graph, torch.ones(2), *values)
    read = with_derived(graph, values)
    graph.lint()
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.mul, torch.add, torch.mul]
    assert len(tensors_of(graph)) == 1 + len(read)
    assert tensors_of(graph)[0] == "x"
    assert {float(each[0]) for each in read} == {7.0, 6.0, -5.0}
    torch.testing.assert_close(run(graph, given, *read), before, rtol=0, atol=0)


def test_what_hangs_on_inputs_stays():
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    pair = graph.call_function(derived(doubled, 2), (weight, x))
    graph.output((graph.call_function(operator.getitem, (pair, 0)), weight))
    values = [torch.ones(2)]
    before = run(graph, torch.ones(2), *values)
    assert with_derived(graph, values)[0] is values[0]
    torch.testing.assert_close(run(graph, torch.ones(2), *values), before, rtol=0, atol=0)

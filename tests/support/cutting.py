"""Graphs that are cut into regions, and run with these as calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxopt.runtime.values import meta_of

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
W = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))

log: list[object] = []


def noted(x: Tensor, word: object = "noted") -> Tensor:
    """Stand for a call with effects, of which no library knows."""
    if isinstance(x, fx.Proxy):
        return x.tracer.create_proxy("call_function", noted, (x, word), {})
    log.append(word)
    return x * 1


class _Noting(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, graph: fx.Graph) -> None:
        super().__init__(module)
        self.graph = graph
        self.metas: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.metas[n] = meta_of(value)
        return value


def traced(function: Callable[..., object]) -> fx.Graph:
    return fx.symbolic_trace(function).graph


def metas_of(graph: fx.Graph, *given: Tensor, root: nn.Module | None = None) -> Mapping[fx.Node, Any]:
    """Return what the nodes of a graph give in a call."""
    noting = _Noting(fx.GraphModule(root or nn.Module(), graph), graph)
    noting.run(*(x.clone() for x in given))
    return noting.metas


def called(region: Any) -> Callable[..., Any]:
    """Return a region as the function that an engine would compute."""
    module = fx.GraphModule(nn.Module(), region.graph())

    def region_(*operands: Tensor) -> Sequence[Tensor]:
        log.append("region")
        return module(*operands)

    return region_


def written(found: Any, root: nn.Module | None = None) -> fx.GraphModule:
    graph = found.written(called)
    graph.lint()
    return fx.GraphModule(root or nn.Module(), graph)


def inside(region: Any) -> list[str]:
    return [node.name for node in region.nodes]


def left(graph: fx.Graph) -> list[str]:
    """Return what a graph runs besides regions and their results."""
    kept = [node for node in graph.nodes if node.op in ("call_function", "call_method", "call_module")]
    return [node.name for node in kept if node.target is not operator.getitem and not node.name.startswith("region")]


def same(function: Callable[..., Any], found: Any, *given: Tensor) -> None:
    expected, result = function(*(x.clone() for x in given)), written(found)(*(x.clone() for x in given))
    torch.testing.assert_close(result, expected)


def two(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.linear(x, w).relu(), w)

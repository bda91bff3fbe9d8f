"""Written-out attention taken out of its graph: what it is given, and both ways of computing it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer

from ...operators import canonical_name
from ...runtime.values import TensorMeta
from ..swap_kernels import Occurrence, is_cast

__all__ = ["Compute", "Excerpt", "excerpt_of"]

_VIEWS = frozenset(
    "chunk contiguous expand flatten getitem narrow permute reshape select split squeeze transpose unbind unflatten "
    "unsqueeze view".split()
)
"""What lays out operands and results in memory, and computes nothing."""

_MASKS = ("mask", "hidden", "shown")

Compute = Callable[..., Tensor]


@dataclass(frozen=True)
class Excerpt:
    """Attention by itself: operands made by `laid_out` of `sources`, and both ways of computing it."""

    operands: tuple[str, ...]
    sources: tuple[TensorMeta, ...]
    laid_out: Compute
    ways: tuple[Compute, Compute]
    beyond: tuple[Compute, Compute]
    code: str

    def given(self) -> list[Tensor]:
        """Return random operands as they lie in memory in the model; no mask hides all of a row."""
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(each.shape, generator=generator) for each in self.sources]
        given = list(self.laid_out(*(x.to(each.dtype) for x, each in zip(drawn, self.sources, strict=True))))
        for number, name in enumerate(self.operands):
            if name in _MASKS:
                given[number] = _mask(name, given[number])
        return given


def _mask(name: str, drawn: Tensor) -> Tensor:
    hides = torch.rand(drawn.shape, generator=torch.Generator().manual_seed(1)) < 1 / 4
    hides[..., 0] = False
    if name == "mask":
        return drawn.masked_fill(hides, -torch.inf)
    return hides if name == "hidden" else hides.logical_not()


def excerpt_of(found: Occurrence) -> Excerpt | None:
    """Return an occurrence by itself; None where its graph does not say all that it is given."""
    operands, root = found.found.nodes, found.program.module(found.owner)
    try:
        layout, sources = _layout(operands)
        ways = _way(found, by_kernel=False), _way(found, by_kernel=True)
        behind = _views_behind(found.result)
        graphs = [layout, *ways, *(_with(graph, behind, found.result) for graph in ways)]
    except KeyError:
        return None
    modules = [fx.GraphModule(root, graph) for graph in graphs]
    code = "\n".join([str(sources), *(module.code for module in modules)])
    laid_out, before, after, *beyond = (module.forward for module in modules)
    return Excerpt(tuple(operands), sources, laid_out, (before, after), (beyond[0], beyond[1]), code)


def _layout(operands: Mapping[str, fx.Node]) -> tuple[fx.Graph, tuple[TensorMeta, ...]]:
    """Return a graph that makes operands of what they are views of."""
    nodes, starts = set[fx.Node](), dict[fx.Node, None]()
    for name, node in operands.items():
        *views, start = [node] if name in _MASKS else _views(node)
        nodes.update(views)
        starts[start] = None
    graph = fx.Graph()
    known: dict[fx.Node, Any] = {node: graph.placeholder(f"source_{number}") for number, node in enumerate(starts)}
    _copy(nodes, known, graph)
    graph.output(tuple(known[node] for node in operands.values()))
    return graph, tuple(node.meta["val"] for node in starts)


def _views(node: fx.Node) -> list[fx.Node]:
    """Return a node and what it is a view of, one of the other, up to a tensor that is computed."""
    chain = [node]
    while _is_view(chain[-1]):
        chain += _tensors(chain[-1])
    while not isinstance(chain[-1].meta["val"], TensorMeta):  # one of several results
        chain.pop()
    return chain


def _is_view(node: fx.Node) -> bool:
    known = canonical_name(node) in _VIEWS or is_cast(node)
    return known and len(_tensors(node)) == 1 and node.args[:1] == (_tensors(node)[0],)


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [each for each in node.all_input_nodes if _is_tensor(each)]


def _is_tensor(node: fx.Node) -> bool:
    """Say whether a node gives tensors, and no numbers."""
    value = node.meta["val"]
    held = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)
    return any(isinstance(each, TensorMeta) for each in held)


def _way(found: Occurrence, *, by_kernel: bool) -> fx.Graph:
    graph = fx.Graph()
    known: dict[fx.Node, Any] = {node: graph.placeholder(name) for name, node in found.found.nodes.items()}
    if by_kernel:
        tracer = GraphAppendingTracer(graph)
        result = found.computed(lambda node: fx.Proxy(known[node], tracer) if node in known else node.meta["val"])
        graph.output(result.node)
    else:
        _copy(found.found.computed, known, graph)
        graph.output(known[found.result])
    return graph


def _views_behind(result: fx.Node) -> list[fx.Node]:
    """Return what lays out a result for what reads it."""
    behind, node = list[fx.Node](), result
    while len(node.users) == 1 and _is_view(next(iter(node.users))):
        node = next(iter(node.users))
        behind.append(node)
    return behind


def _with(graph: fx.Graph, behind: Sequence[fx.Node], result: fx.Node) -> fx.Graph:
    longer = fx.Graph()
    known: dict[fx.Node, Any] = {result: longer.graph_copy(graph, {})}
    _copy(behind, known, longer)
    longer.output(known[behind[-1] if behind else result])
    return longer


def _copy(nodes: Collection[fx.Node], known: dict[fx.Node, Any], graph: fx.Graph) -> None:
    """Write nodes into another graph, with the numbers that others give; a `KeyError` names what is no number."""

    def value_of(node: fx.Node) -> Any:
        if node in known:
            return known[node]
        if _is_tensor(node):
            raise KeyError(node.name)
        return node.meta["val"]

    for node in sorted(nodes):
        if node not in known:
            args, kwargs = fx.map_arg(node.args, value_of), fx.map_arg(node.kwargs, value_of)
            known[node] = graph.create_node(node.op, node.target, args, kwargs)

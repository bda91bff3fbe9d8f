"""The whole dataflow of a model as one graph that looks through module boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx, nn
from torch.fx.node import map_arg

from ...compat import submodule
from ..graphs import Capture, Specialization, capture_of
from ..guards import Source, reader
from ..values import qualified

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["FlatNode", "FlatView"]


class FlatNode(NamedTuple):
    """One node, in one of the calls by which it is run.

    Attributes:
        path: names of the call_module nodes that lead here from the root's graph; () is the root's own.
        owner: qualified name of the module whose graph holds the node.
        node: the node; shared captures have the same one in several owners.
    """

    path: tuple[str, ...]
    owner: str
    node: fx.Node


class FlatView:
    """Show all nodes and the flow of values between them; the first specialization of each module.

    A call of a captured module is replaced by what its graph does: values flow from the call's arguments to its
    placeholders, and from its output to the users of the call. Calls of leaves and opaque modules stay. Read-only.
    """

    def __init__(self, model: nn.Module) -> None:
        import networkx as nx  # a third of a second, and few look at a model so

        self._model = model
        graph: nx.DiGraph[FlatNode] = nx.DiGraph()
        self.graph = graph
        root = self._capture("")
        if root is not None:
            self._add((), "", root)

    def __iter__(self) -> Iterator[FlatNode]:
        return iter(self.graph.nodes)

    def __len__(self) -> int:
        return len(self.graph)

    def users(self, node: FlatNode) -> list[FlatNode]:
        """Return the nodes that a node's value flows to directly."""
        return list(self.graph.successors(node))

    def inputs(self, node: FlatNode) -> list[FlatNode]:
        """Return the nodes whose values flow to a node directly."""
        return list(self.graph.predecessors(node))

    def _add(self, path: tuple[str, ...], owner: str, capture: Capture) -> tuple[list[FlatNode], FlatNode | None]:
        """Add one call of `owner`; return its placeholders and its output."""
        sources: dict[fx.Node, FlatNode] = {}
        output: FlatNode | None = None
        for node in capture.specializations[0].graph.nodes:
            flat = FlatNode(path, owner, node)
            called = qualified(owner, str(node.target))
            inner = self._capture(called) if node.op == "call_module" else None
            if inner is not None:
                sources[node] = self._add_call(flat, called, inner, sources)
                continue
            self.graph.add_node(flat)
            self.graph.add_edges_from((sources[used], flat) for used in node.all_input_nodes)
            sources[node] = flat
            output = flat if node.op == "output" else output
        return [flat for node, flat in sources.items() if node.op == "placeholder"], output

    def _add_call(self, call: FlatNode, called: str, capture: Capture, sources: Mapping[fx.Node, FlatNode]) -> FlatNode:
        """Add what a call does, joined to its arguments; return where its value comes from."""
        placeholders, output = self._add((*call.path, call.node.name), called, capture)
        given = _given(capture, capture.specializations[0], call.node)
        for placeholder in placeholders:
            for used in given[placeholder.node.name]:
                self.graph.add_edge(sources[used], placeholder)
        return call if output is None else output

    def _capture(self, name: str) -> Capture | None:
        module = submodule(self._model, name)
        capture = None if module is None else capture_of(module)
        return capture if capture is not None and capture.specializations else None


def _given(capture: Capture, specialization: Specialization, call: fx.Node) -> dict[str, list[fx.Node]]:
    """Return placeholder name -> the nodes of the caller that it gets its value from."""
    try:
        bound = capture.parameters.bind(call.args, dict(call.kwargs))
    except TypeError:
        bound = {}
    placeholders = specialization.graph.find_nodes(op="placeholder")
    return {node.name: _nodes_at(specialization.argument(node), bound, call) for node in placeholders}


def _nodes_at(source: Source, bound: Mapping[str, Any], call: fx.Node) -> list[fx.Node]:
    """Return the nodes in the argument at `source`; every argument where it cannot be told which."""
    try:
        value = reader(bound)(source)
    except (LookupError, TypeError):
        return call.all_input_nodes
    found: list[fx.Node] = []
    map_arg(value, found.append)
    return found

"""A graph of torch.fx as a graph of networkx, for whoever analyses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ...errors import expect
from ...runtime.record import view_of
from ...runtime.values import TensorMeta

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["to_networkx"]


def to_networkx(graph: fx.Graph) -> nx.DiGraph[str]:
    """Return a graph of torch.fx, of fxopt or not, as a `networkx.DiGraph`, in the order of its nodes.

    Nodes are called as in the graph. An edge leads from a node to each that reads it. Attributes of a node:

    - `op`: `placeholder`, `get_attr`, `call_module`, `call_function`, `call_method` or `output`;
    - `target`: the function, method, module or tensor that it names, as text;
    - `shape`: of the tensor that it gives, a tuple, and `dtype`, as `"float32"`; None where no tensor is known;
    - `source`: file and line of the user's code, as `"model.py:12"`, or `""`;
    - `module`: the module that it calls, or the one that holds the tensor that it reads, or `""`.

    Args:
        graph: one of `fxopt.graphs(model)`, of `fxopt.capture(model).graphs`, or any other.

    Raises:
        UsageError: it is no `torch.fx.Graph`.
    """
    import networkx as nx  # a third of a second

    expect(graph, fx.Graph, "graph", "a torch.fx.Graph, as fxopt.graphs(model) has them")
    made: nx.DiGraph[str] = nx.DiGraph()
    for node, view in zip(graph.nodes, view_of(graph).nodes, strict=True):
        shape, dtype = _tensor(node)
        module = _module(node)
        made.add_node(
            view.name, op=view.op, target=view.target, shape=shape, dtype=dtype, source=view.source, module=module
        )
        made.add_edges_from((read, view.name) for read in view.inputs)
    return made


def _tensor(node: fx.Node) -> tuple[tuple[Any, ...] | None, str | None]:
    """Return shape and dtype of what a node gives, by whoever has noted them: fxopt, torch.export, ShapeProp."""
    value: Any = node.meta.get("val", node.meta.get("tensor_meta"))
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(value, (Tensor, TensorMeta)) and not isinstance(dtype, torch.dtype):
        return None, None
    return tuple(shape or ()), str(dtype).removeprefix("torch.")


def _module(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    return str(node.target).rpartition(".")[0] if node.op == "get_attr" else ""

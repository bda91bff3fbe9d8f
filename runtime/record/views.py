"""Graphs as data: what reports show of each node, without the modules and tensors that the graph holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import fx

from ..values import TensorMeta

__all__ = ["GraphView", "NodeView", "view_of"]

_MOST_TENSORS = 4
"""So many tensors of one value are written out."""


@dataclass(frozen=True)
class NodeView:
    """A node of a graph, in words.

    Attributes:
        name: the same in every version of its graph.
        op: `placeholder`, `get_attr`, `call_module`, `call_function`, `call_method` or `output`.
        target: the function, method, module or tensor that it names.
        inputs: names of the nodes that it reads.
        line: what torch.fx prints of it.
        value: type and shape of what it gave with the example inputs, as `float32[2, 64]`; "" where none is known.
        source: file and line of the user's code, as `model.py:12`, or "".
        made_by: the pass that made it, and the key of the site; empty for what was captured.
    """

    name: str
    op: str
    target: str
    inputs: tuple[str, ...]
    line: str
    value: str
    source: str
    made_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphView:
    """A graph as it was at one time; `str` is what torch.fx prints of it."""

    nodes: tuple[NodeView, ...]

    def __str__(self) -> str:
        return "\n".join(["graph():", *(f"    {node.line}" for node in self.nodes)])


def view_of(graph: fx.Graph) -> GraphView:
    """Return a graph as data."""
    return GraphView(tuple(map(_node_view, graph.nodes)))


def _node_view(node: fx.Node) -> NodeView:
    made_by = node.meta.get("provenance") or ()
    return NodeView(
        node.name, node.op, _target_text(node), tuple(each.name for each in node.all_input_nodes),
        node.format_node() or "", _value_text(node.meta.get("val")), str(node.meta.get("source") or ""),
        tuple(map(str, made_by)),
    )  # fmt: skip


def _target_text(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, str):
        return target
    module = getattr(target, "__module__", None) or ""
    return f"{module.removeprefix('_')}.{getattr(target, '__name__', type(target).__name__)}".lstrip(".")


def _value_text(value: Any) -> str:
    """Say what tensors a value holds; plain numbers and objects are no news."""
    if isinstance(value, TensorMeta):
        return str(value)
    if isinstance(value, (list, tuple)):
        texts = [text for each in cast("Sequence[Any]", value) if (text := _value_text(each))]
        return f"({', '.join(texts[:_MOST_TENSORS])}{', ...' if len(texts) > _MOST_TENSORS else ''})" if texts else ""
    if isinstance(value, dict):
        return _value_text(list(cast("dict[Any, Any]", value).values()))
    return ""

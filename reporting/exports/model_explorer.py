"""A picture as a collection of graphs for Model Explorer (github.com/google-ai-edge/model-explorer)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .drawing import Drawn, sides_of

__all__ = ["model_explorer", "times_of_nodes"]

_UNITS = ("microseconds", "operations", "bytes moved")
_GRADIENT = [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#d9534f"}]


def model_explorer(picture: Mapping[str, Any]) -> dict[str, Any]:
    """Return a picture as a collection: one graph, or those before and after; modules are layers that open."""
    graphs = [{"id": side.name, "nodes": [_node(each) for each in side.nodes]} for side in sides_of(picture)]
    return {"label": picture["title"], "graphs": graphs}


def times_of_nodes(picture: Mapping[str, Any]) -> dict[str, Any]:
    """Return the times of nodes as node data of Model Explorer, which colours and adds them up; empty without costs."""
    found = {
        side.name: {node.id: {"value": node.cost[0]} for node in side.nodes if node.cost and not node.opens}
        for side in sides_of(picture)
    }
    return {name: {"results": times, "gradient": _GRADIENT} for name, times in found.items() if times}


def _node(node: Drawn) -> dict[str, Any]:
    costs = {unit: f"{figure:g}" for unit, figure in zip(_UNITS, node.cost, strict=False)}
    attributes = {**node.attributes, **costs}
    return {
        "id": node.id,
        "label": node.label,
        "namespace": "/".join(part.replace("/", "_") for part in node.scope),
        "attrs": [{"key": key, "value": text} for key, text in attributes.items()],
        "incomingEdges": [
            {"sourceNodeId": read, "sourceNodeOutputId": "0", "targetNodeInputId": str(place)}
            for place, read in enumerate(node.inputs)
        ],
        "outputsMetadata": [{"id": "0", "attrs": [{"key": "tensor_shape", "value": node.value}]}] if node.value else [],
    }

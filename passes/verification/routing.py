"""Say whether what a module computes is picked by its data, as the experts of a mixture are."""

from __future__ import annotations

from torch import fx, nn

from ...runtime.graphs import capture_of

__all__ = ["picks_by_data"]

_PICKING = frozenset({"argmax", "argsort", "bincount", "nonzero", "one_hot", "sort", "topk"})


def picks_by_data(module: nn.Module) -> bool:
    """Say whether a graph in the module holds an operation that is used to route rows by what they hold."""
    captures = (capture_of(child) for child in module.modules())
    return any(
        _picks(node)
        for capture in captures
        if capture is not None
        for specialization in capture.specializations
        for node in specialization.graph.nodes
    )


def _picks(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "where":
        return len(node.args) == 1
    if name == "max":
        return len(node.args) + len(node.kwargs) > 1
    return node.op != "call_module" and name in _PICKING

"""Name a node as its user knows it: by the operation, and the line of the user's code."""

from __future__ import annotations

from torch import fx

__all__ = ["operation_at"]


def operation_at(node: fx.Node) -> str:
    """Return what a node does and where the user wrote it: `'add_' at model.py:12`."""
    place = node.meta.get("source")
    return f"'{_operation(node)}'" + (f" at {place}" if place else "")


def _operation(node: fx.Node) -> str:
    if callable(node.target):
        return str(getattr(node.target, "__name__", node.name))
    return str(node.target)

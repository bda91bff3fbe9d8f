"""Equal modules share one capture, so that what is found out about one holds for all."""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn

from .captured import Capture, class_for
from .meta import Meta, TensorMeta

__all__ = ["hashable", "share_equal"]


def share_equal(captured: dict[str, Capture], modules: dict[str, nn.Module]) -> None:
    """Give modules whose graphs, examples and kinds of children are equal the same capture, in place.

    Args:
        captured: name -> capture.
        modules: name -> module.
    """
    known: dict[Hashable, Capture] = {}
    distinct: dict[Capture, Capture] = {}
    for name, capture in captured.items():
        if capture not in distinct:
            distinct[capture] = known.setdefault(_key(capture, modules[name]), capture)
        captured[name] = distinct[capture]


def _key(capture: Capture, module: nn.Module) -> Hashable:
    """Describe a capture; the class stands for the code, guards and objects that it refers to."""
    nodes = tuple(
        (node.name, node.meta.get("source"), hashable(node.meta.get("val")), _callee(module, node.op, node.target))
        for variant in capture.variants
        for node in variant.graph.nodes
    )
    return class_for(capture), nodes, tuple(variant.reads for variant in capture.variants)


def _callee(module: nn.Module, op: str, target: object) -> type | None:
    return type(module.get_submodule(str(target))) if op == "call_module" else None


def hashable(meta: Meta) -> Hashable:
    """Return a description as something that can be a key."""
    if isinstance(meta, (TensorMeta, str, int, float, bool, type)) or meta is None:
        return meta
    if isinstance(meta, tuple):
        return tuple(hashable(item) for item in meta)
    return repr(meta)

"""Find the edges of the graph that a pooled tensor is the features of."""

from __future__ import annotations

import inspect
from typing import Any

from torch import fx, nn

from ...operators import canonical_name
from ...passes.sites import Refusal
from ...tracing.program import Program
from ...tracing.values import qualified

__all__ = ["COARSENING", "edges_before", "full_name"]

COARSENING = {
    "torch_geometric.nn.pool.topk_pool.TopKPooling": "topk",
    "torch_geometric.nn.pool.sag_pool.SAGPooling": "sag",
    "torch_geometric.nn.pool.asap.ASAPooling": "asap",
    "torch_geometric.nn.pool.edge_pool.EdgePooling": "edge",
    "fxopt.layers.pooling.triad_pooling.RO3TriadPooling": "ro3",
    "fxopt.layers.pooling.sag_triads.SAGTriadPooling": "ro3",
}
"""Class -> what it is called; each gives new features and new edges first."""


def full_name(module: nn.Module) -> str:
    """Return the qualified name of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def edges_before(program: Program, owner: str, x: fx.Node) -> fx.Node | Refusal:
    """Return the edges that went into the message passing before `x`, or the call that coarsened; or why neither.

    Args:
        program: read only.
        owner: the module whose graph holds `x`.
        x: features of nodes.
    """
    at = qualified(owner, x.name)
    found: dict[fx.Node, int | None] = {}
    seen, queue = {x}, [x]
    while queue:
        node = queue.pop()
        edges = _edges_of(program, owner, node)
        if edges is not None:
            found[edges] = _rows(node)
            continue
        if node.op == "call_module" and _passes_messages(program.callee(owner, node)):
            return Refusal(f"'{node.name}' passes messages over edges that it does not take as 'edge_index'", at)
        if _reorders(node):
            return Refusal(
                f"'{node.name}' picks or reorders its nodes: they are no longer those that edge_index names", at
            )
        before = [used for used in node.all_input_nodes if used not in seen]
        seen.update(before)
        queue += before
    if not found:
        return Refusal("no message passing in this forward says which edges its nodes have", at)
    if len(found) > 1:
        return Refusal("several edge_index lead to it, of different graphs", at)
    edges, rows = found.popitem()
    if rows != _rows(x):
        return Refusal("its nodes are no longer those that edge_index names", at)
    return edges


def _edges_of(program: Program, owner: str, node: fx.Node) -> fx.Node | None:
    """Return the edges that a call passes messages over, or that it gives where it coarsens."""
    source: Any = node.args[0] if getattr(node.target, "__name__", "") == "getitem" else node
    if not isinstance(source, fx.Node) or source.op != "call_module":
        return None
    module = program.callee(owner, source)
    if full_name(module) in COARSENING:
        return next((user for user in source.users if _takes(user, 1)), source)
    if source is not node:
        return None
    try:
        given = inspect.signature(module.forward).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):
        return None
    edges = given.get("edge_index")
    return edges if isinstance(edges, fx.Node) else None


def _passes_messages(module: nn.Module) -> bool:
    """Say whether a module is or holds message passing, which has edges of its own."""
    return any(hasattr(each, "propagate") for each in module.modules())


_REORDERING = (
    "flip", "sort", "index_select", "roll", "gather", "take", "masked_select", "narrow", "repeat_interleave", "topk",
    "take_along_dim", "flipud", "rot90", "unique",
)  # fmt: skip


def _reorders(node: fx.Node) -> bool:
    """Say whether rows of a node's result may be others than those of what it reads."""
    if canonical_name(node) != "getitem":
        called = canonical_name(node) or str(getattr(node.target, "__name__", node.target))
        return called.rpartition(".")[2] in _REORDERING
    of, key = node.args
    if not isinstance(of, fx.Node) or not hasattr(of.meta.get("val"), "shape"):
        return False
    first: Any = key[0] if isinstance(key, tuple) and key else key
    return not (first is Ellipsis or first is None or first == slice(None))


def _takes(user: fx.Node, index: int) -> bool:
    return getattr(user.target, "__name__", "") == "getitem" and user.args[1:] == (index,)


def _rows(node: fx.Node) -> int | None:
    shape = getattr(node.meta.get("val"), "shape", None)
    return shape[0] if shape else None

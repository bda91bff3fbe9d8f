"""Find the edges of the graph that a pooled tensor is the features of."""

from __future__ import annotations

import inspect
from typing import Any

from torch import fx, nn

from ...passes.sites import Refusal
from ...runtime.values import qualified
from ...tracing.program import Program
from .rows import carriers, keeps_rows, name_of_call, number_of_rows

__all__ = ["COARSENING", "edges_before", "full_name"]

COARSENING = {
    "torch_geometric.nn.pool.topk_pool.TopKPooling": "topk",
    "torch_geometric.nn.pool.sag_pool.SAGPooling": "sag",
    "torch_geometric.nn.pool.asap.ASAPooling": "asap",
    "torch_geometric.nn.pool.edge_pool.EdgePooling": "edge",
}
"""Class -> what it is called; each gives new features and new edges first."""

_COARSENS = "_fxopt_coarsens"
"""The attribute by which a layer of fxopt says so: PyTorch Geometric, which it stands on, takes seconds to import."""


def full_name(module: nn.Module) -> str:
    """Return the qualified name of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def edges_before(program: Program, owner: str, x: fx.Node) -> fx.Node | Refusal:
    """Return the edges of the message passing before features `x`, or the call that coarsened; or why neither."""
    at = qualified(owner, x.name)
    found: dict[fx.Node, int | None] = {}
    seen, queue = {x}, [x]
    while queue:
        node = queue.pop()
        edges = _edges_of(program, owner, node)
        if edges is not None:
            found[edges] = number_of_rows(node)
            continue
        inside = program.callee(owner, node).modules() if node.op == "call_module" else ()
        if any(hasattr(each, "propagate") for each in inside):
            return Refusal(f"'{node.name}' passes messages over edges that it does not take as 'edge_index'", at)
        if not keeps_rows(program, owner, node):
            return Refusal(_moved(program, owner, node), at)
        before = [used for used in carriers(node) if used not in seen]
        seen.update(before)
        queue += before
    if not found:
        return Refusal("no message passing in this forward says which edges its nodes have", at)
    if len(found) > 1:
        return Refusal("several edge_index lead to it, of different graphs", at)
    edges, rows = found.popitem()
    if rows != number_of_rows(x):
        return Refusal("its nodes are no longer those that edge_index names", at)
    return edges


def _edges_of(program: Program, owner: str, node: fx.Node) -> fx.Node | None:
    """Return the edges that a call passes messages over, or that it gives where it coarsens."""
    source: Any = node.args[0] if getattr(node.target, "__name__", "") == "getitem" else node
    if not isinstance(source, fx.Node) or source.op != "call_module":
        return None
    module = program.callee(owner, source)
    if full_name(module) in COARSENING or getattr(module, _COARSENS, False):
        taken = (user for user in source.users if getattr(user.target, "__name__", "") == "getitem")
        return next((user for user in taken if user.args[1:] == (1,)), source)
    if source is not node:
        return None
    try:
        given = inspect.signature(module.forward).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):
        return None
    edges = given.get("edge_index")
    return edges if isinstance(edges, fx.Node) else None


def _moved(program: Program, owner: str, node: fx.Node) -> str:
    """Return why the nodes behind a call may not be those before it."""
    called = name_of_call(program, owner, node)
    if called == "getitem":
        return f"'{node.name}' picks or reorders its nodes: they are no longer those that edge_index names"
    return f"'{node.name}' may pick or reorder its nodes: whether {called} keeps those of edge_index is not known"

"""Find the edges of the graph that a pooled tensor is the features of."""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch import fx, nn

from ...operators import canonical_name, operator_info, operator_of_module
from ...passes.sites import Refusal
from ...runtime.values import qualified
from ...tracing.program import Program

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

_KEEPING = frozenset(
    "linear embedding batch_norm layer_norm rms_norm normalize softmax log_softmax softmin glu prelu rrelu identity "
    "dropout alpha_dropout feature_alpha_dropout gumbel_softmax derived matmul mm addmm bilinear masked_fill "
    "contiguous clone detach bfloat16 double float half to type type_as zeros_like ones_like rand_like "
    "randn_like".split()
)
"""Beside those that compute element by element."""

_RESHAPING = frozenset(
    "cat stack chunk split unbind flatten unflatten unsqueeze squeeze view view_as reshape expand expand_as getitem "
    "sum mean amax amin max min norm std var prod logsumexp".split()
)
"""These keep rows where the first dimension is what it was: a row is split, joined or summed up then."""

_CELLS = (nn.GRUCell, nn.LSTMCell, nn.RNNCell)
_GEOMETRIC = ("torch_geometric.nn.norm.", "torch_geometric.nn.dense.linear.")
"""Modules of PyTorch Geometric that go row by row, by where their classes are."""


def full_name(module: nn.Module) -> str:
    """Return the qualified name of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def edges_before(program: Program, owner: str, x: fx.Node, batch: Any) -> fx.Node | Refusal:
    """Return the edges of the message passing before features `x`, or the call that coarsened; or why neither. What
    `batch` picks for each node, its graph's, is in the order of the nodes.
    """
    at = qualified(owner, x.name)
    found: dict[fx.Node, int | None] = {}
    seen, queue = {x}, [x]
    while queue:
        node = queue.pop()
        edges = _edges_of(program, owner, node)
        if edges is not None:
            found[edges] = _number_of_rows(node)
            continue
        if isinstance(batch, fx.Node) and _is_of_graphs(node, batch):
            continue
        inside = program.callee(owner, node).modules() if node.op == "call_module" else ()
        if any(hasattr(each, "propagate") for each in inside):
            return Refusal(f"'{node.name}' passes messages over edges that it does not take as 'edge_index'", at)
        if not _keeps_rows(program, owner, node):
            return Refusal(_moved(program, owner, node), at)
        before = [used for used in _carriers(node) if used not in seen]
        seen.update(before)
        queue += before
    if not found:
        return Refusal("no message passing in this forward gives the edges of its nodes", at)
    if len(found) > 1:
        return Refusal("several edge_index of different graphs lead to it", at)
    edges, rows = found.popitem()
    if rows != _number_of_rows(x):
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
    called = _name_of_call(program, owner, node)
    if called == "getitem":
        return f"'{node.name}' picks or reorders its nodes: they are no longer those that edge_index names"
    return f"'{node.name}' may pick or reorder its nodes: whether {called} keeps those of edge_index is not known"


# -- which operations keep the nodes of a graph where they are: row by row, in the order that edges name them ----------


def _keeps_rows(program: Program, owner: str, node: fx.Node) -> bool:
    """Say whether row i of a node's result belongs to the same node of the graph as row i of what it reads."""
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if node.op == "call_module":
        return _module_keeps(program, qualified(owner, str(node.target)), program.callee(owner, node))
    name = _name_of_call(program, owner, node)
    if name == "getitem":
        return _item_keeps(node)
    if node.target is getattr:
        return not hasattr(node.all_input_nodes[0].meta.get("val"), "shape")
    if name in _RESHAPING:
        return _same_length(node)
    return name in _KEEPING or operator_info(name).elementwise


def _carries_rows(node: fx.Node) -> bool:
    """Say whether a node may be the features of nodes: it is a tensor or holds some."""
    value = node.meta.get("val")
    return value is None or any(hasattr(leaf, "shape") for leaf in _flat(value))


def _carriers(node: fx.Node) -> list[fx.Node]:
    """Return those operands of a call whose rows are those of its result."""
    name = canonical_name(node)
    if name in ("matmul", "mm", "linear", "embedding"):
        return [each for each in node.args[:1] if isinstance(each, fx.Node)]
    return [each for each in node.all_input_nodes if _carries_rows(each)]


def _number_of_rows(node: fx.Node) -> int | None:
    """Return the length of a node's value, where it is a tensor with a first dimension."""
    shape = getattr(node.meta.get("val"), "shape", None)
    return shape[0] if shape else None


def _name_of_call(program: Program, owner: str, node: fx.Node) -> str:
    """Return what a node calls, for a message."""
    if node.op == "call_module":
        return type(program.callee(owner, node)).__name__
    return canonical_name(node) or str(getattr(node.target, "__name__", node.target))


def _module_keeps(program: Program, path: str, module: nn.Module) -> bool:
    name = operator_of_module(type(module))
    if name is not None:
        return name in _KEEPING or operator_info(name).elementwise
    if isinstance(module, _CELLS) or f"{type(module).__module__}.".startswith(_GEOMETRIC):
        return True
    capture = program.captures.get(path)
    graphs = () if capture is None else [each.graph for each in capture.specializations]
    return bool(graphs) and all(
        _keeps_rows(program, path, node) for graph in graphs for node in graph.nodes if _carries_rows(node)
    )


def _is_of_graphs(node: fx.Node, batch: fx.Node) -> bool:
    """Say whether a node gives each row what its graph has (`pooled[batch]`), as virtual nodes do."""
    is_picked = canonical_name(node) == "index_select" and node.args[1:2] == (0,)
    if not is_picked and getattr(node.target, "__name__", "") != "getitem":
        return False
    index = node.args[-1]
    return index is batch or (
        isinstance(index, fx.Node)
        and batch.target is getattr
        and (index.target, index.args) == (batch.target, batch.args)
    )


def _item_keeps(node: fx.Node) -> bool:
    """Say whether an item of a tensor has all its rows; items of other things are what they are."""
    of, key = node.args
    if not isinstance(of, fx.Node) or not hasattr(of.meta.get("val"), "shape"):
        return True
    first: Any = key[0] if isinstance(key, tuple) and key else key
    return first is Ellipsis or first is None or first == slice(None)


def _same_length(node: fx.Node) -> bool:
    first = node.all_input_nodes[0] if node.all_input_nodes else node
    shapes = [getattr(item, "shape", None) for item in _flat(node.meta.get("val"))]
    return all(shape and shape[0] == _number_of_rows(first) for shape in shapes)


def _flat(value: Any) -> list[Any]:
    """Return what a value holds, out of tuples, lists and dictionaries."""
    if isinstance(value, dict):
        return _flat([*cast("dict[Any, Any]", value).values()])
    if not isinstance(value, (tuple, list)):
        return [value]
    return [leaf for item in cast("list[Any]", value) for leaf in _flat(item)]

"""What the layers of torch.nn call, with as few calls of Python in between as there can be."""

from __future__ import annotations

import types
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...compat.calls import DIRECT
from ...layers.folded import expect_one_of
from ...runtime.graphs import copy_graph
from ...runtime.values import INTERNAL, is_plain_structure
from ...tracing.rules import leaf_graph

__all__ = ["leaf_body", "settings_of", "shorten"]

_FRESH = (F.linear, torch.conv1d, torch.conv2d, torch.conv3d, torch.batch_norm)
"""Their results are new, and their gradients do without them: what follows may write there."""

_NORMS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}
"""Kind -> the numbers of dimensions that it takes."""


def leaf_body(module: nn.Module) -> fx.Graph | None:
    """Return the graph of what a layer calls in its mode, with its tensors as attributes; None where it has none."""
    graph = _norm_in_evaluation(module) if type(module) in _NORMS else leaf_graph(module)
    return None if graph is None else copy_graph(graph)


def settings_of(module: nn.Module) -> tuple[tuple[str, Any], ...] | None:
    """Return the attributes that a layer's forward reads, with their values; None where one is no plain value."""
    read = _names_read(type(module))
    found = tuple((name, value) for name, value in vars(module).items() if name in read and name not in _REGISTRIES)
    return found if all(is_plain_structure(value) for _, value in found) else None


_REGISTRIES = frozenset(INTERNAL) - {"training"}


def _names_read(kind: type) -> set[str]:
    """Return the names in the code of a class's forward, and in that of its methods which are among these."""
    names: set[str] = set()
    pending = ["forward"]
    while pending:
        function = getattr(kind, pending.pop(), None)
        if isinstance(function, types.FunctionType):
            new = set(function.__code__.co_names) - names
            names |= new
            pending += new
    return names


def _norm_in_evaluation(module: nn.Module) -> fx.Graph | None:
    """Return the graph of a batch norm that has statistics and does not update them."""
    norm = cast("nn.BatchNorm2d", module)
    if norm.training or norm.running_mean is None or norm.running_var is None:
        return None
    graph = fx.Graph()
    x = graph.placeholder("input")
    graph.call_function(expect_one_of, (graph.call_method("dim", (x,)), *_NORMS[type(norm)]))
    tensors = [graph.get_attr(name) for name in ("running_mean", "running_var")]
    tensors += [graph.get_attr(name) for name in ("weight", "bias") if norm.affine]
    padding = [None] * (4 - len(tensors))
    graph.output(graph.call_function(F.batch_norm, (x, *tensors, *padding, False, 0.0, norm.eps)))
    return graph


def shorten(graph: fx.Graph) -> None:
    """Let a graph call what functions call in the end, and write ReLUs into results that nothing else reads."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is F.dropout:
            _drop(node)
        elif node.op == "call_function" and node.target in DIRECT:
            _call_directly(node)
    for node in graph.find_nodes(op="call_function", target=torch.relu):
        x = node.args[0]
        if isinstance(x, fx.Node) and x.op == "call_function" and x.target in _FRESH and len(x.users) == 1:
            node.target = torch.relu_


def _drop(node: fx.Node) -> None:
    """Take a dropout out that drops nothing."""
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    x = node.args[0] if node.args else node.kwargs.get("input")
    if training is False and isinstance(x, fx.Node):
        node.replace_all_uses_with(x)
        node.graph.erase_node(node)


def _call_directly(node: fx.Node) -> None:
    function, passed_on = DIRECT[node.target]
    try:
        args = passed_on(*node.args, **node.kwargs)
    except TypeError:
        return  # spelled otherwise
    if args is not None and isinstance(args[0], fx.Node):
        node.target, node.args, node.kwargs = function, args, {}

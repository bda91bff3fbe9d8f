"""Batch norms with a forward of their own: what it computes behind the norm, read off its graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...operators import info_of, normalized_arguments
from ...passes.rewriting import only_user, unmet_guards
from ...runtime.graphs import Specialization, capture_of
from ...runtime.guards import Applied, Argument, Attribute, Constant, Method, Source
from ...runtime.values import user_class

__all__ = ["Tail", "tail_of"]

_READ = ("running_mean", "running_var", "weight", "bias")
"""Arguments of the norm that must be its attributes of these names."""

_COMPARISONS = frozenset((operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge))
_DROPOUTS = frozenset((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout))


@dataclass(frozen=True, eq=False)
class Tail:
    """What a norm's own forward computes behind the norm, `start`; `flags` read `self.training`, which is false."""

    start: fx.Node
    nodes: tuple[fx.Node, ...]
    flags: frozenset[fx.Node] = frozenset()
    dimensions: int | None = None


def tail_of(norm: nn.Module) -> Tail | str:
    """Return what a batch norm's own forward computes behind the norm; or why it cannot be folded, as a clause."""
    name, capture = user_class(type(norm)).__name__, capture_of(norm)
    fitting = [] if capture is None else [each for each in capture.specializations if each.runs_in_mode(norm)]
    if len(fitting) != 1:
        return f"the batch norm is a {name}, which has its original forward"
    graph = fitting[0].graph
    found = list(_chain(graph, norm))
    output = graph.output_node()
    if not found or output.all_input_nodes != [found[-1]] or len(output.args) != 1:
        return f"the forward of the batch norm, a {name}, does more than norm and compute element by element"
    used = {*found, *(each for node in found for each in node.all_input_nodes), output}
    if any(node not in used for node in graph.nodes):
        return f"the forward of the batch norm, a {name}, computes something besides"
    dimensions = _dimensions(norm, fitting[0], found[0])
    if dimensions == 0:
        return f"the forward of the batch norm, a {name}, decides by its input"
    flags = frozenset(node for node in graph.nodes if _is_flag(node))
    return Tail(found[0], tuple(found[1:]), flags, dimensions)


def _chain(graph: fx.Graph, norm: nn.Module) -> Iterator[fx.Node]:
    """Yield the norm in a graph, and what is computed behind it as far as it is known."""
    inputs = graph.find_nodes(op="placeholder")
    node = only_user(inputs[0]) if len(inputs) == 1 else None
    if node is None or not _is_norm(node, inputs[0], norm):
        return
    yield node
    while (after := only_user(node)) is not None:
        read = [each for each in after.all_input_nodes if not _is_flag(each)]
        if after.op == "output" or read != [node] or not _is_known(after, norm):
            return
        yield (node := after)


def _is_norm(node: fx.Node, x: fx.Node, norm: nn.Module) -> bool:
    """Say whether a node norms the input with all that is the norm's own, in evaluation."""
    if node.target is not F.batch_norm:
        return False
    named = normalized_arguments("batch_norm", node.target, node.args, node.kwargs).named
    training = named.get("training", False)
    plain = named.get("input") is x and (training is False or (isinstance(training, fx.Node) and _is_flag(training)))
    return plain and named.get("eps", 1e-5) == getattr(norm, "eps", None) and all(
        _is_own(named.get(name), getattr(norm, name, None), name) for name in _READ
    )  # fmt: skip


def _is_flag(node: fx.Node) -> bool:
    return node.op == "get_attr" and node.target == "training"


def _is_own(argument: Any, tensor: object, name: str) -> bool:
    if argument is None:
        return tensor is None
    return isinstance(argument, fx.Node) and argument.op == "get_attr" and argument.target == name


def _is_known(node: fx.Node, norm: nn.Module) -> bool:
    """Say whether a node can be computed in another graph: a child that is called, or an element-wise function."""
    if node.op == "call_module":
        return len(node.args) == 1 and not node.kwargs and hasattr(norm, str(node.target))
    return node.op in ("call_function", "call_method") and (info_of(node).elementwise or node.target in _DROPOUTS)


def _dimensions(norm: nn.Module, specialization: Specialization, node: fx.Node) -> int | None:
    """Return how many dimensions a forward asks the input to have; None: any number, 0: it asks for something else."""
    name, given = next((str(each.target), each) for each in node.all_input_nodes if each.op == "placeholder")
    unmet = [each for each in unmet_guards(norm, specialization, {name: given}) if not each.asks_for_training]
    if not unmet:
        return None
    if not all(_asks_for_number(source) for guard in unmet for source in guard.sources()):
        return 0
    images = (torch.empty([1] * count, device="meta") for count in (4, 3, 2, 5))
    return next((x.dim() for x in images if all(g.holds({"self": norm, name: x}) for g in unmet)), 0)


def _asks_for_number(source: Source) -> bool:
    """Say whether a source is an input, the number of its dimensions, a constant or a comparison of these."""
    if isinstance(source, Attribute):
        return source.name == "ndim"
    if isinstance(source, Applied):
        return source.function in _COMPARISONS
    if isinstance(source, Method):
        return source.name == "dim"
    return isinstance(source, (Argument, Constant))

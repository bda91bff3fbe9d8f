"""The calls of a graph in one spelling, whether modules, functions or methods."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ...compat import has_hooks
from ...operators import CallArguments, canonical_name, mutates, normalized_arguments, operator_info, operator_of_module
from ...runtime.guards import Argument
from ...runtime.values import user_class
from ...tracing.program import Program
from ...tracing.rules import leaf_graph
from .effects import overwrites_unseen, writes
from .inlining import lasting_guards, only_graph, reason_against_inlining

__all__ = ["Held", "OperatorCall", "call_in", "is_undisturbed", "only_user"]


@dataclass(frozen=True)
class Held:
    """A tensor or setting that a called module reads of itself, by its name as seen from the graph's owner."""

    name: str


def is_undisturbed(program: Program, owner: str, computed: Collection[fx.Node]) -> bool:
    """Say whether nothing else is written between the first and the last of some nodes of a graph."""
    if len(computed) < 2:
        return True
    node, last = min(computed), max(computed)
    while node is not last:
        if node not in computed and writes(node, program, owner):
            return False
        node = node.next
    return True


def only_user(node: fx.Node) -> fx.Node | None:
    """Return what reads a node, if that is one node."""
    return next(iter(node.users)) if len(node.users) == 1 else None


@dataclass(frozen=True)
class OperatorCall:
    """A call of an operator."""

    named: Mapping[str, Any]  # parameter -> value, defaults filled in
    orders: Sequence[Sequence[Any]]  # the operands by position, in each order that gives the same result


def call_in(program: Program, owner: str, node: fx.Node, operator: str) -> OperatorCall | None:
    """Return a node's call of an operator, in whatever spelling; None if it computes another one, or writes."""
    if node.op == "call_module":
        called = _called_by(program.callee(owner, node), operator, node)
        if called is None:
            return None
    elif canonical_name(node) == operator:
        called = node, normalized_arguments(operator, node.target, node.args, node.kwargs)
    else:
        return None
    inner, arguments = called
    if mutates(inner) and not overwrites_unseen(node, program, owner):
        return None
    return OperatorCall(arguments.named, _orders(operator, arguments))


def _orders(operator: str, arguments: CallArguments) -> Sequence[Sequence[Any]]:
    """Return the operands in their order and, where that is as good, with the first two exchanged."""
    operands = arguments.positional
    if not operator_info(operator).commutative or arguments.given != 2 or len(operands) < 2:
        return (operands,)
    return operands, (operands[1], operands[0], *operands[2:])


def _called_by(module: nn.Module, operator: str, node: fx.Node) -> tuple[fx.Node, CallArguments] | None:
    """Return a module's call of an operator, if that is all it does."""
    known = operator_of_module(user_class(type(module)))
    if known is None:
        return _in_capture(module, operator, node)
    return None if known != operator or has_hooks(module) else _inside(module, operator, node)


def _in_capture(module: nn.Module, operator: str, node: fx.Node) -> tuple[fx.Node, CallArguments] | None:
    """Return what a captured module calls, if that is one operator whatever it is given: an activation of a library."""
    found = only_graph(module, node)
    call = None if found is None else _only_call(found[0].graph)
    if found is None or call is None or canonical_name(call) != operator or reason_against_inlining(module):
        return None
    specialization, given = found
    sources = {each: specialization.argument(each) for each in specialization.graph.find_nodes(op="placeholder")}
    plain = all(isinstance(source, Argument) and source.name in given for source in sources.values())
    if not plain or lasting_guards(module, specialization, given):
        return None
    named = {n.name: given[getattr(source, "name", "")] for n, source in sources.items()}
    return call, _as_if_outside(call, operator, node.target, named)


def _only_call(graph: fx.Graph) -> fx.Node | None:
    calls = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    one = len(calls) == 1 and calls[0].op != "call_module" and graph.output_node().args[0] is calls[0]
    return calls[0] if one else None


def _as_if_outside(call: fx.Node, operator: str, path: Any, given: Mapping[str, Any]) -> CallArguments:
    """Return the arguments of a call inside of the module called `path`, by what that is given."""

    def value(inner: fx.Node) -> Any:
        return given[inner.name] if inner.op == "placeholder" else Held(f"{path}.{inner.target}")

    args, kwargs = fx.map_arg((call.args, call.kwargs), value)
    return normalized_arguments(operator, call.target, args, kwargs)


def _inside(module: nn.Module, operator: str, node: fx.Node) -> tuple[fx.Node, CallArguments]:
    """Return what a module of one operator calls, as if the graph called that itself. Tensors of the module are no
    nodes of the graph; only a pattern that says nothing of them fits.
    """
    outside = node, CallArguments(node.args, node.kwargs, len(node.args) + len(node.kwargs))
    graph = None if "forward" in vars(module) else leaf_graph(module)  # of its class
    calls = [] if graph is None else [n for n in graph.nodes if n.op in ("call_function", "call_method")]
    if graph is None or len(calls) != 1 or canonical_name(calls[0]) != operator:
        return outside
    try:
        given = inspect.signature(module.forward).bind(*node.args, **node.kwargs)
    except TypeError:
        return outside
    given.apply_defaults()
    named = {n.name: given.arguments[str(n.target)] for n in graph.find_nodes(op="placeholder")}
    return calls[0], _as_if_outside(calls[0], operator, node.target, named)

"""Where something computes what a kernel does: operations of a graph, or a call of a module that does just that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from torch import fx, nn

from ...cuda_ops import Kernel
from ...operators import canonical_name, operator_of_module
from ...passes.rewriting import Held, Match, only_graph, reason_against_inlining, unmet_guards
from ...runtime.graphs import Specialization
from ...runtime.guards import SELF, Argument, Attribute, Guard, is_switch
from ...runtime.values import qualified, user_class
from ...tracing.program import Program
from .decompositions import Spelled, spelled, uncast
from .occurrences import Occurrence

__all__ = ["occurrence"]

_SETTINGS = (int, float, str, tuple, type(None))


def occurrence(program: Program, owner: str, node: fx.Node, kernel: Kernel) -> Occurrence | str | None:
    """Return what a node computes as a kernel does; None if it computes something else, or why it stays as it is."""
    first: str | None = None
    for found in _found(program, owner, node, kernel):
        reason = found.reason_against()
        if reason is None:
            return found
        first = first or reason
    return first


def _found(program: Program, owner: str, node: fx.Node, kernel: Kernel) -> Iterator[Occurrence]:
    if kernel.into is None:
        yield from _spelled(program, owner, node, kernel)
        return
    for last in (*_spelled(program, owner, node, kernel.into), *_called(program, owner, node, kernel.into)):
        if "x" in last.found.nodes:
            yield from _led_into(last, kernel)


def _spelled(program: Program, owner: str, node: fx.Node, kernel: Kernel) -> Iterator[Occurrence]:
    """Yield what is written out in the graph."""
    last, every = uncast(node), _by_operator(kernel)
    if last.op == "call_module":
        operator = operator_of_module(user_class(type(program.callee(owner, last))))
    else:
        operator = canonical_name(last) or ""
    for known in every.get(operator, ()):  # all, of a module that is no known operator
        for found in known.pattern.at(program, owner, node):
            yield Occurrence(kernel, found, known.settings)


@cache
def _by_operator(kernel: Kernel) -> Mapping[str | None, Sequence[Spelled]]:
    found: dict[str | None, list[Spelled]] = {None: []}
    for known in map(spelled, kernel.decompositions):
        found[None].append(known)
        found.setdefault(known.operator, []).append(known)
    return found


def _led_into(last: Occurrence, kernel: Kernel) -> Iterator[Occurrence]:
    """Yield the same with what its operand is computed by: that is the second result."""
    second = last.found.nodes["x"]
    names = {name: node for name, node in last.found.nodes.items() if name != "x"}
    for spelling in kernel.decompositions:
        known = spelled(spelling)
        for found in known.pattern.at(last.program, last.owner, second):
            both = replace(
                last.found,
                nodes={**names, **found.nodes},
                values={**last.found.values, **found.values},
                computed=(*last.found.computed, *found.computed),
            )
            if both.is_undisturbed:
                yield Occurrence(kernel, both, {**last.settings, **known.settings}, second)


# -- modules that do nothing else ----------------------------------------------------------------------------------


def _called(program: Program, owner: str, node: fx.Node, kernel: Kernel) -> Iterator[Occurrence]:
    """Yield what a called module computes and nothing besides, as if the graph computed that itself."""
    module = program.callee(owner, node) if node.op == "call_module" else None
    captured = None if module is None else only_graph(module, node)
    if module is None or captured is None:
        return
    specialization, given = captured
    result = specialization.graph.output_node().args[0]
    if not isinstance(result, fx.Node) or reason_against_inlining(module):
        return
    if not all(_is_sealed(guard, module) for guard in unmet_guards(module, specialization, given)):
        return
    inside = qualified(owner, str(node.target))
    for found in _spelled(program, inside, result, kernel):
        operands = _from_outside(found, specialization, given, str(node.target))
        rest = (each for each in specialization.graph.nodes if each.op not in ("placeholder", "get_attr", "output"))
        # The dtype of an argument, say, is read for a cast.
        is_all = all(each in found.found.computed or each.target is getattr for each in rest)
        if operands is not None and is_all:
            pattern, (nodes, values) = found.found.pattern, operands
            yield Occurrence(kernel, Match(program, owner, 0, pattern, node, nodes, values, (node,)), found.settings)


def _is_sealed(guard: Guard, module: nn.Module) -> bool:
    """Say whether a condition is of plain settings of the module, and is met: they are sealed by the swap."""
    attributes = [source for source in guard.sources() if isinstance(source, Attribute)]
    plain = all(each.owner == SELF and isinstance(getattr(module, each.name), _SETTINGS) for each in attributes)
    return bool(attributes) and plain and not any(map(is_switch, guard.sources())) and guard.holds({"self": module})


def _from_outside(
    found: Occurrence, specialization: Specialization, given: Any, path: str
) -> tuple[dict[str, fx.Node], dict[str, Any]] | None:
    """Return the operands as the caller sees them, or None where one is nothing that it could name."""
    names: dict[str, fx.Node] = {}
    values = {k: Held(f"{path}.{v.name}") if isinstance(v, Held) else v for k, v in found.found.values.items()}
    for name, node in found.found.nodes.items():
        source = specialization.argument(node) if node.op == "placeholder" else None
        value = given.get(source.name) if isinstance(source, Argument) else None
        if isinstance(value, fx.Node):
            names[name] = value
        elif node.op == "get_attr":
            values[name] = Held(f"{path}.{node.target}")
        else:
            return None
    return names, values

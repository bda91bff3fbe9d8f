"""Guards that one trace alone does not give: for arguments that training loops add, and for sizes of one."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...runtime.graphs import Capture, Specialization
from ...runtime.guards import (
    Applied,
    Argument,
    Attribute,
    Guard,
    Has,
    Source,
    Truth,
    equal,
    item_of,
    key_of,
    length_of,
    require,
)
from ...runtime.values import ModelNames, Signature
from ..recording import Call
from ..trace import VARYING

__all__ = ["ExtraArguments", "Traced", "told_apart"]


class ExtraArguments:
    """Find out which graphs hold with an argument more."""

    def __init__(self, names: ModelNames) -> None:
        self._names = names
        root = names.modules[""]
        self._reached = {root} if root.training else set[nn.Module]()
        self._passed_on: dict[int, set[str] | None] = {}
        """Of each graph that was asked: the children that are given the argument; None where it is read."""

    def ask(
        self,
        module: nn.Module,
        signature: Signature,
        call: Call | None,
        found: Specialization,
        trace: Callable[[Call], Specialization],
    ) -> None:
        """Trace a forward once more, with the argument, where a call may come to it; `found` is the graph without."""
        rest = _rest(signature)
        if call is None or rest is None or module not in self._reached or VARYING in call.forward_arguments[1]:
            return
        try:
            passed_on = _passed_on(found, trace(_with_extra(call)), rest)
        except Exception:  # whatever a forward raises that takes no such argument
            passed_on = None
        self._passed_on[id(found.graph)] = passed_on
        self._reached.update(module.get_submodule(path) for path in passed_on or ())

    def relax(self, captured: Mapping[str, Capture]) -> None:
        """Let the graphs that hold with the argument take it."""
        unread = {id(capture): capture for capture in captured.values() if self._is_unread(capture)}
        while True:
            reading = {
                id(capture)
                for name, capture in captured.items()
                if id(capture) in unread and not self._is_unread_below(name, capture, captured, unread.keys())
            }
            if not reading:
                break
            unread = {key: capture for key, capture in unread.items() if key not in reading}
        for capture in unread.values():
            rest = _rest(capture.parameters)
            if rest is not None:
                specializations = capture.specializations
                specializations[:] = [dataclasses.replace(v, guards=_relaxed(v.guards, rest)) for v in specializations]

    def _is_unread(self, capture: Capture) -> bool:
        graphs = [each.graph for each in capture.specializations]
        return bool(graphs) and all(self._passed_on.get(id(graph)) is not None for graph in graphs)

    def _is_unread_below(
        self, name: str, capture: Capture, captured: Mapping[str, Capture], unread: Iterable[int]
    ) -> bool:
        module = self._names.modules[name]
        paths = {path for each in capture.specializations for path in self._passed_on[id(each.graph)] or ()}
        below = (captured.get(self._names.name(module.get_submodule(path))) for path in paths)
        return all(found is not None and id(found) in unread for found in below)


def _rest(signature: Signature) -> Argument | None:
    """Return the forward's `**kwargs`, if it has one."""
    found = (p.name for p in signature.parameters if p.kind is inspect.Parameter.VAR_KEYWORD)
    return next(map(Argument, found), None)


def _with_extra(call: Call) -> Call:
    args, kwargs = call.forward_arguments
    more = {**kwargs, VARYING: torch.tensor(2)}
    received = None if call.received is None else (args, more)
    return dataclasses.replace(call, kwargs={**call.kwargs, VARYING: more[VARYING]}, received=received)


def _passed_on(found: Specialization, probed: Specialization, rest: Argument) -> set[str] | None:
    """Return which children are given the argument, if that is all that becomes of it and of its being there."""
    graph, place = probed.graph, item_of(rest, VARYING)
    paths: set[str] = set()
    for node in [node for node in graph.find_nodes(op="placeholder") if probed.argument(node) == place]:
        for user in list(node.users):
            user.kwargs = {key: value for key, value in user.kwargs.items() if key != VARYING}
            if user.op != "call_module" or node in user.all_input_nodes:
                return None
            paths.add(str(user.target))
        graph.erase_node(node)
    same = _are_same(found.graph, graph) and _others(found.guards, rest) == _others(probed.guards, rest)
    return paths if same and found.reads == probed.reads else None


def _are_same(one: fx.Graph, other: fx.Graph) -> bool:
    if len(one.nodes) != len(other.nodes):
        return False
    twins = dict(zip(other.nodes, one.nodes, strict=True))

    def described(node: fx.Node, of: Callable[[fx.Node], fx.Node]) -> tuple[Any, ...]:
        return node.op, node.target, fx.map_arg((node.args, node.kwargs), of)

    return all(described(b, twins.__getitem__) == described(a, lambda node: node) for b, a in twins.items())


def _others(guards: Iterable[Guard], rest: Argument) -> set[Guard]:
    """Return the guards that are not about which arguments are given."""
    asked = {length_of(rest), _names_of(rest), item_of(rest, VARYING)}
    extra = Has(key_of(VARYING))
    return {g for g in guards if asked.isdisjoint(g.sources()) and not (g.source == rest and g.check == extra)}


def _names_of(rest: Source) -> Source:
    return Applied(tuple, (rest,))


def _relaxed(guards: Iterable[Guard], rest: Argument) -> tuple[Guard, ...]:
    """Return guards that hold with the argument, too."""
    key = key_of(VARYING)
    instead = {
        length_of(rest): Applied(count_besides, (rest, key)),
        _names_of(rest): Applied(names_besides, (rest, key)),
    }
    return tuple(
        dataclasses.replace(guard, source=instead[guard.source]) if guard.source in instead else guard
        for guard in guards
    )


def count_besides(arguments: Mapping[str, Any], name: str) -> int:
    """Return how many arguments there are, one of them not counted."""
    return len(arguments) - (name in arguments)


def names_besides(arguments: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the names of arguments in their order, one of them left out."""
    return tuple(each for each in arguments if each != name)


Traced = list[tuple[Call | None, Specialization]]
"""Graphs, each with the call that it was traced for."""


def told_apart(traced: Traced, signature: Signature) -> list[Specialization]:
    """Return graphs that no call enters in vain where one argument has a size of one for some of them only."""
    return [_asking(call, each, traced, signature) for call, each in traced]


def _asking(call: Call | None, mine: Specialization, traced: Traced, signature: Signature) -> Specialization:
    rivals = [other for other, each in traced if other is not call and _only_checks_differ(mine, each)]
    asked = [guard for other in rivals for guard in [_distinction(call, other, signature)] if guard is not None]
    return replace(mine, guards=tuple(dict.fromkeys((*mine.guards, *asked)))) if asked else mine


def _only_checks_differ(one: Specialization, other: Specialization) -> bool:
    return frozenset(one.guards) == frozenset(other.guards) and _has_checks(one) and _has_checks(other)


def _has_checks(specialization: Specialization) -> bool:
    return bool(specialization.graph.find_nodes(op="call_function", target=require))


def _distinction(call: Call | None, other: Call | None, signature: Signature) -> Guard | None:
    """Return what holds of the sizes in one call and not in another: the first that is one in either."""
    if call is None or other is None:
        return None
    mine, theirs = dict(_sizes(call, signature)), dict(_sizes(other, signature))
    for source, size in mine.items():
        beside = theirs.get(source, size)
        if (size == 1) != (beside == 1) and size and beside:
            if size == 1:
                return equal(source, 1)
            several = Applied(operator.ne, (source, key_of(1)))
            return Guard(several, Truth(expected=True), f"{source} is not 1")
    return None


def _sizes(call: Call, signature: Signature) -> Iterator[tuple[Source, int]]:
    args, kwargs = call.plain_arguments
    for name, value in signature.bind(args, dict(kwargs)).items():
        if isinstance(value, Tensor):
            shape = Attribute(Argument(name), "shape")
            yield from ((item_of(shape, dim), size) for dim, size in enumerate(value.shape))

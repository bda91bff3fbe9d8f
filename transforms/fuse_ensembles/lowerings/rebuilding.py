"""Write a graph anew around replaced operations, in an order that respects data and writes."""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import fx

from ....errors import MatchFailure
from ....runtime.values import map_leaves
from ..inlining import InlinedGraph, Operation, operations_in
from ..search import writes_to_fresh_value

__all__ = ["Unit", "Writer", "rebuild"]


@dataclass
class Unit:
    """A piece of the new graph: what it reads, what it gives, and how it is written."""

    order: int  # position among units that could come next; the smallest goes first
    needs: Sequence[Hashable]  # keys of values: operations, or any object that stands for a new value
    gives: Sequence[Hashable]
    emit: Callable[[Writer], None]  # writes the nodes and stores what it gives in `writer.values`
    barrier: bool = False  # it writes into memory, so everything earlier stays before it and everything later behind


@dataclass
class Writer:
    """The new graph and the values written so far."""

    graph: fx.Graph
    values: dict[Any, Any] = field(default_factory=dict[Any, Any])  # key -> node
    origins: Mapping[str, Any] = field(default_factory=dict[str, Any])  # old node -> what it stood for at first

    def origin_of(self, members: Iterable[Operation]) -> tuple[str, ...]:
        """Return the calls that the members of a pack were parts of at first."""
        found = ((member.call, self.origins.get(member.call)) for member in members)
        return tuple(origin if isinstance(origin, str) else call for call, origin in found)

    def substitute(self, argument: Any) -> Any:
        return map_leaves(lambda leaf: self.values[leaf] if isinstance(leaf, Operation) else leaf, argument, Operation)


def rebuild(
    graph: fx.Graph, inlined: InlinedGraph, replacements: Sequence[Unit], covered: Iterable[Operation]
) -> fx.Graph:
    """Return a new graph with `replacements` in the place of `covered` operations, and their calls written out."""
    covered = set(covered)
    written_out = {operation.call for operation in covered}
    needed = {key for unit in replacements for key in unit.needs}
    origins = {node.name: node.meta.get("origin", node.name) for node in graph.nodes}
    writer = Writer(fx.Graph(), origins=origins)
    for unit in _scheduled([*replacements, *_kept(graph, inlined, covered, written_out, needed, origins)]):
        unit.emit(writer)
    return writer.graph


def _kept(
    graph: fx.Graph, inlined: InlinedGraph, covered: set[Operation], written_out: set[str], needed: set[Hashable],
    origins: Mapping[str, Any],
) -> Iterable[Unit]:  # fmt: skip
    for operation in inlined.operations:
        idle = operation not in needed and _is_idle(operation, covered)
        if operation.call in written_out and operation not in covered and not idle:
            yield _operation_unit(operation, origins[operation.call])
    last = {operation.call: operation.index for operation in inlined.operations}
    writing = {op.call for op in inlined.operations if op.mutates and not writes_to_fresh_value(op)}
    for node in graph.nodes:
        result = inlined.results[node.name]
        idle = isinstance(result, Operation) and result not in needed and _is_idle(result, covered)
        if node.name not in written_out and not idle:
            yield _node_unit(node, inlined, last.get(node.name, 0), node.name in writing)


def _is_idle(operation: Operation, covered: set[Operation]) -> bool:
    """Say whether nothing but covered operations reads a tensor of the owner, or what one picks from a value."""
    picks = operation.operator == "getitem" and bool(operation.users)
    return (picks or operation.kind == "get_attr") and all(user in covered for user in operation.users)


def _operation_unit(operation: Operation, origin: Any) -> Unit:
    def emit(writer: Writer) -> None:
        node = writer.graph.create_node(
            operation.kind, operation.target,
            writer.substitute(operation.args), writer.substitute(operation.kwargs),
            name=operation.name.replace("/", "_"),
        )  # fmt: skip
        # Verification's random draws are named after the call that this was a part of.
        node.meta = {**operation.node.meta, "val": operation.example, "origin": origin}
        writer.values[operation] = node

    return Unit(operation.index, list(operation.inputs), [operation], emit, operation.mutates)


def _node_unit(node: fx.Node, inlined: InlinedGraph, order: int, mutating: bool) -> Unit:
    needs = [leaf for source in node.all_input_nodes for leaf in operations_in(inlined.results[source.name])]
    result = inlined.results[node.name]
    gives = [leaf for leaf in operations_in(result) if leaf not in needs]

    def emit(writer: Writer) -> None:
        if node.target in (operator.getitem, len) and not gives:
            return  # an item of a structure whose items are known, or their number
        copy = writer.graph.node_copy(node, lambda source: writer.substitute(inlined.results[source.name]))
        _give(result, copy, writer)

    return Unit(order if node.op != "output" else order + 1, needs, gives, emit, mutating)


def _give(result: Any, node: fx.Node, writer: Writer) -> None:
    """Store what `node` gives, item by item where it is a structure."""
    if isinstance(result, Operation):
        writer.values.setdefault(result, node)
    elif isinstance(result, (tuple, list, dict)):
        items: Any = cast("Any", result)
        for key in items if isinstance(result, dict) else range(len(items)):
            if operations_in(items[key]):
                _give(items[key], writer.graph.call_function(operator.getitem, (node, key)), writer)


def _scheduled(units: Sequence[Unit]) -> Iterable[Unit]:
    """Yield the units so that each comes after what it needs, earliest order first (Kahn, 1962)."""
    givers = {key: number for number, unit in enumerate(units) for key in unit.gives}
    waits: list[set[int]] = [{givers[key] for key in unit.needs if key in givers} for unit in units]
    _add_barriers(units, waits)
    followers: dict[int, list[int]] = defaultdict(list)
    for number, sources in enumerate(waits):
        sources.discard(number)
        for source in sources:
            followers[source].append(number)
    ready = [(units[number].order, number) for number, sources in enumerate(waits) if not sources]
    heapq.heapify(ready)
    done = 0
    while ready:
        _, number = heapq.heappop(ready)
        done += 1
        yield units[number]
        for follower in followers[number]:
            waits[follower].discard(number)
            if not waits[follower]:
                heapq.heappush(ready, (units[follower].order, follower))
    if done != len(units):
        raise MatchFailure("the fused operations depend on one another in a circle")


def _add_barriers(units: Sequence[Unit], waits: list[set[int]]) -> None:
    for barrier, unit in enumerate(units):
        if not unit.barrier:
            continue
        for number, other in enumerate(units):
            if other.order < unit.order:
                waits[barrier].add(number)
            elif other.order > unit.order:
                waits[number].add(barrier)

"""Write what a pack reads, and where members leave an ensemble: joined again, or one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ....errors import MatchFailure
from ....layers import batched_layers
from ....layers import ensemble as batched
from ....layers.vectorized import Template
from ....operators import function_of
from ....runtime.guards import require
from ..inlining import Operation
from ..search import (
    Ensemble,
    Flags,
    Gathered,
    Join,
    Operand,
    Pack,
    Parameters,
    Selected,
    Shared,
    gives_new_value,
    is_stacked,
    same_shape,
)
from .rebuilding import Unit, Writer

__all__ = ["Task", "keys_of", "leaving_units", "members_dims", "order_of", "stacked", "template_of"]


def order_of(pack: Pack) -> int:
    """Return the place of a pack among the units of a graph: that of its first member."""
    return min(member.index for member in pack.members)


def keys_of(operand: Operand) -> Sequence[Any]:
    """Return the keys of the values that have to be written before an operand can be."""
    match operand:
        case Pack():
            return [operand]
        case Shared():
            return [operand.operation]
        case Selected():
            return [operand.source]
        case Gathered():
            return operand.operations
        case Flags() | Parameters():
            return []


def stacked(operand: Operand, count: int, task: Task, writer: Writer, *, flat: bool = False) -> fx.Node:
    """Write an operand with the members along dimension 0, a shared one as it is; `flat` vectors side by side."""
    graph = writer.graph
    match operand:
        case Pack() | Shared():
            return writer.values[operand if isinstance(operand, Pack) else operand.operation]
        case Flags():
            return graph.call_function(batched_layers.members_training, tuple(map(graph.get_attr, operand.names)))
        case Parameters():
            node = graph.get_attr(task.names[operand.names])
            node.meta["parameter"] = True
            size = task.vectors.get(str(node.target))
            return node if flat or size is None else graph.call_function(batched.split_vectors, (node, count, size))
        case Selected():
            return graph.call_function(batched.select_members, (writer.values[operand.source], operand.dim, count))
        case Gathered():
            values = tuple(writer.values[operation] for operation in operand.operations)
            if not all(same_shape(operand.operations[0], other) for other in operand.operations[1:]):
                alike = graph.call_function(batched.have_one_shape, values)
                reason = "the members read tensors of one shape when they were fused"
                graph.call_function(require, (alike, True, reason, task.may_restart))
            return graph.call_function(batched.gather_members, values)


def template_of(pack: Pack) -> Template:
    """Return what one member's module computes, of a pack of module calls."""
    if pack.module is None:
        raise MatchFailure("the members' module is gone")
    return Template(pack.module, pack.arguments, pack.state)


def members_dims(operands: Sequence[Operand]) -> tuple[int | None, ...]:
    """Return for each operand the dimension along which its members lie, or None where it is the same for all."""
    return tuple(0 if is_stacked(operand) else None for operand in operands)


@dataclass(frozen=True)
class Task:
    """One ensemble that is to be written into a graph, and what is at hand for that."""

    ensemble: Ensemble
    names: Mapping[tuple[str, ...], str]  # parameters of a position -> name of their stack
    vectors: Mapping[str, int]  # name of a stacked tensor in which vectors lie behind one another -> their length
    add_module: Callable[[nn.Module], str]  # registers a module in the owner and returns its name
    may_restart: bool  # whether the owner may run its original forward after having begun with its graph


def leaving_units(task: Task) -> Iterator[Unit]:
    """Yield the units of graph that join the members of packs, and that part them where they are read singly."""
    packs, all_joins, covered = task.ensemble.packs, task.ensemble.joins, task.ensemble.covered
    read = {key for pack in packs for o in pack.operands if not isinstance(o, Pack) for key in keys_of(o)}
    read.update(o for joins in all_joins.values() for join in joins for o in join.addends if isinstance(o, Operation))
    for pack in packs:
        single = any(member in read or any(u not in covered for u in member.users) for member in pack.members)
        copy = pack.operator not in _KEEP_NO_RESULT or _readers(pack, task) > 1
        yield from (_join_unit(pack, join, copy or single) for join in task.ensemble.joins[pack])
        if single:
            read_again = pack.operator not in _KEEP_NO_RESULT or _readers(pack, task) > 0
            # Somebody may write to a member's result by itself: it is returned, or something is viewed in it.
            written = any(not gives_new_value(user) for member in pack.members for user in member.users)
            yield _unbind_unit(pack, copy=written and read_again)


_KEEP_NO_RESULT = frozenset("linear add sub mul div".split())
"""Operators whose backward does not read their result, so that it may be written to."""


def _readers(pack: Pack, task: Task) -> int:
    """Return how many joins and packs read the members of a pack together."""
    added = sum(join.addends.count(pack) for joins in task.ensemble.joins.values() for join in joins)
    return len(task.ensemble.joins[pack]) + added + sum(other.operands.count(pack) for other in task.ensemble.packs)


def _join_unit(pack: Pack, join: Join, copy: bool) -> Unit:
    def emit(writer: Writer) -> None:
        writer.values[join.root] = _write_join(join, writer.values[pack], writer, copy)

    extra = [addend for addend in join.addends if isinstance(addend, (Operation, Pack))]
    return Unit(join.root.index, [pack, *extra], [join.root], emit)


def _write_join(join: Join, value: fx.Node, writer: Writer, copy: bool) -> fx.Node:
    graph = writer.graph
    if join.kind != "sum":
        function = batched.stack_members if join.kind == "stack" else batched.concatenate_members
        node = graph.call_function(function, (value, join.dim), {"copy": True} if copy else {})
    else:
        node = graph.call_function(batched.sum_members, (value,))
        for addend in join.addends:
            if isinstance(addend, Pack):
                node = graph.call_function(
                    function_of("add"), (node, graph.call_function(batched.sum_members, (writer.values[addend],)))
                )
            elif isinstance(addend, Operation) or addend != 0:
                node = graph.call_function(function_of("add"), (node, writer.substitute(addend)))
    node.meta.setdefault("val", join.root.node.meta.get("val"))
    return node


def _unbind_unit(pack: Pack, copy: bool) -> Unit:
    """Give each member's result by itself, for the users that do not take them all."""

    def emit(writer: Writer) -> None:
        graph, value = writer.graph, writer.values[pack]
        if pack.result == "common":
            writer.values.update(dict.fromkeys(pack.members, value))
            return
        if pack.result == "several":
            for position, member in enumerate(pack.members):
                writer.values[member] = graph.call_function(batched_layers.results_of_member, (value, position))
            return
        parts = graph.call_function(batched.unbind_members, (value,), {"copy": True} if copy else {})
        for position, member in enumerate(pack.members):
            writer.values[member] = graph.call_function(function_of("getitem"), (parts, position))

    return Unit(order_of(pack), [pack], list(pack.members), emit)

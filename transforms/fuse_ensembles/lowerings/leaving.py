"""Write where members leave an ensemble: joined again, or one by one for the operations that read them singly."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from ....layers import batched_layers
from ....layers import ensemble as batched
from ....operators import function_of
from ..inlining import Operation
from ..search import Join, Pack, gives_new_value
from .operands import keys_of, order_of
from .rebuilding import Unit, Writer
from .task import Task

__all__ = ["leaving_units"]


def leaving_units(task: Task) -> Iterator[Unit]:
    """Yield the units of graph that join the members of packs, and that part them where they are read singly."""
    packs = task.ensemble.packs
    read = {key for pack in packs for o in pack.operands if not isinstance(o, Pack) for key in keys_of(o)}
    read.update(o for joins in task.joins.values() for join in joins for o in join.addends if isinstance(o, Operation))
    for pack in packs:
        single = any(member in read or any(u not in task.covered for u in member.users) for member in pack.members)
        copy = pack.operator not in _KEEP_NO_RESULT or _readers(pack, task) > 1
        yield from (_join_unit(pack, join, copy or single) for join in task.joins[pack])
        if single:
            read_again = pack.operator not in _KEEP_NO_RESULT or _readers(pack, task) > 0
            yield _unbind_unit(pack, copy=_may_be_written(pack) and read_again)


_KEEP_NO_RESULT = frozenset("linear add sub mul div".split())
"""Operators whose backward does not read their result, so that it may be written to."""


def _may_be_written(pack: Pack) -> bool:
    """Say whether somebody may write to a member's result by itself: it is returned, or something is viewed in it."""
    return any(not gives_new_value(user) for member in pack.members for user in member.users)


def _readers(pack: Pack, task: Task) -> int:
    """Return how many joins and packs read the members of a pack together."""
    added = sum(join.addends.count(pack) for joins in task.joins.values() for join in joins)
    return len(task.joins[pack]) + added + sum(other.operands.count(pack) for other in task.ensemble.packs)


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

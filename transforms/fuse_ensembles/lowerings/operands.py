"""Write what a pack reads: stacked parameters, the results of other packs, values that are the same for all members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ....errors import MatchFailure
from ....layers import batched_layers
from ....layers import ensemble as batched
from ....layers.templates import Template
from ....runtime.guards import require
from ..inlining import Operation
from ..search import Flags, Gathered, Operand, Pack, Parameters, Selected, Shared, is_stacked, same_shape
from .rebuilding import Writer
from .task import Task

__all__ = ["keys_of", "members_dims", "order_of", "stacked", "template_of"]


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
        case Flags():
            return []
        case Selected():
            return [operand.source]
        case Gathered():
            return operand.operations
        case Parameters():
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
            return _gathered(operand.operations, task, writer)


def _gathered(operations: Sequence[Operation], task: Task, writer: Writer) -> fx.Node:
    """Write the stack of separate values; where their shapes may come to differ, that is asked first."""
    values = tuple(writer.values[operation] for operation in operations)
    if not all(same_shape(operations[0], other) for other in operations[1:]):
        alike = writer.graph.call_function(batched.have_one_shape, values)
        reason = "the members read tensors of one shape when they were fused"
        writer.graph.call_function(require, (alike, True, reason, task.may_restart))
    return writer.graph.call_function(batched.gather_members, values)


def template_of(pack: Pack) -> Template:
    """Return what one member's module computes, of a pack of module calls."""
    if pack.module is None:
        raise MatchFailure("the members' module is gone")
    return Template(pack.module, pack.arguments, pack.state)


def members_dims(operands: Sequence[Operand]) -> tuple[int | None, ...]:
    """Return for each operand the dimension along which its members lie, or None where it is the same for all."""
    return tuple(0 if is_stacked(operand) else None for operand in operands)

"""Write an ensemble's packs as batched operations: the lowerings that `fuse_ensembles` chooses between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import fx, nn
from torch.fx.node import Argument

from ....errors import MatchFailure
from ....layers import batched_layers
from ....layers import ensemble as batched
from ....layers.templates import Slot, Template
from ....passes.operators import POINTWISE, function_of
from ....tracing.guards import require
from ....tracing.structure import map_structure
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
    find_joins,
    gives_new_value,
    is_stacked,
    same_shape,
)
from .batching_rules import call, write_layer
from .rebuilding import Unit, Writer

__all__ = ["Lowering", "covered_operations", "lower"]


@dataclass
class Lowering:
    """How one ensemble is written.

    Attributes:
        ensemble: what to write.
        choice: `wide`, `wide_input_first` (the same graph), `bmm`, `grouped_conv` or `vmap`.
        names: the parameters of each position -> the name of the stacked tensor that holds them.
        add_module: registers a module in the home and returns its name (used by `vmap`).
        may_restart: whether the home may run its own forward after having begun with its graph.
    """

    ensemble: Ensemble
    choice: str
    names: Mapping[tuple[str, ...], str]
    add_module: Callable[[nn.Module], str]
    may_restart: bool
    joins: dict[Pack, list[Join]] = field(default_factory=dict[Pack, list[Join]])

    def __post_init__(self) -> None:
        self.joins = {pack: list(find_joins(pack)) for pack in self.ensemble.packs}


def covered_operations(lowering: Lowering) -> set[Operation]:
    """Return the operations that the lowering replaces."""
    packed = {member for pack in lowering.ensemble.packs for member in pack.members}
    joined = {removed for joins in lowering.joins.values() for join in joins for removed in join.removed}
    return packed | joined


def lower(lowering: Lowering) -> list[Unit]:
    """Return the units of graph that compute the ensemble, its joins, and its single members where those are read."""
    packs = lowering.ensemble.packs
    units = [_vmap_unit(lowering)] if lowering.choice == "vmap" else _pack_units(packs, lowering)
    covered = covered_operations(lowering)
    read = {o for pack in packs for operand in pack.operands for o in _read_singly(operand)}
    for pack in packs:
        single = any(member in read or any(u not in covered for u in member.users) for member in pack.members)
        copy = pack.operator not in _KEEP_NO_RESULT or _readers(pack, lowering) > 1
        units.extend(_join_unit(pack, join, copy or single) for join in lowering.joins[pack])
        if single:
            read_again = pack.operator not in _KEEP_NO_RESULT or _readers(pack, lowering) > 0
            units.append(_unbind_unit(pack, copy=_may_be_written(pack) and read_again))
    return units


_KEEP_NO_RESULT = frozenset("linear add sub mul div".split())
"""Operators whose backward does not read their result, so that it may be written to."""


def _may_be_written(pack: Pack) -> bool:
    """Say whether somebody may write to a member's result by itself: it is returned, or something is viewed in it."""
    return any(not gives_new_value(user) for member in pack.members for user in member.users)


def _readers(pack: Pack, lowering: Lowering) -> int:
    """Return how many joins and packs read the members of a pack together."""
    return len(lowering.joins[pack]) + sum(other.operands.count(pack) for other in lowering.ensemble.packs)


def _read_singly(operand: Operand) -> Sequence[Operation]:
    """Return the operations that an operand reads one by one, members of another pack among them."""
    match operand:
        case Shared():
            return [operand.operation]
        case Selected():
            return [operand.source]
        case Gathered():
            return operand.operations
        case _:
            return []


# -- packs ---------------------------------------------------------------------------------------------------------


def _pack_units(packs: Sequence[Pack], lowering: Lowering) -> list[Unit]:
    """Return a unit for each pack; those that may write to the same buffers keep their order."""
    last: dict[Operand, Pack] = {}
    units: list[Unit] = []
    for pack in packs:
        state = [o for o in pack.operands if isinstance(o, Parameters)] if pack.state else []
        before = {last[operand] for operand in state if operand in last}
        last.update(dict.fromkeys(state, pack))
        units.append(_pack_unit(pack, before, lowering))
    return units


def _pack_unit(pack: Pack, before: Collection[Pack], lowering: Lowering) -> Unit:
    def emit(writer: Writer) -> None:
        if pack.operator == "linear":
            node = _write_linear(pack, lowering, writer)
        elif pack.operator in POINTWISE:
            node = _write_pointwise(pack, lowering, writer)
        else:
            values = [_stacked(operand, pack.size, lowering, writer) for operand in pack.operands]
            node = _write_layer(pack, values, lowering, writer)
        node.meta["origin"] = writer.origin_of(pack.members)
        writer.values[pack] = node

    return Unit(_order(pack), [*before, *(key for o in pack.operands for key in _keys(o))], [pack], emit)


def _order(pack: Pack) -> int:
    return min(member.index for member in pack.members)


def _keys(operand: Operand) -> Sequence[Any]:
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


def _stacked(operand: Operand, count: int, lowering: Lowering, writer: Writer) -> fx.Node:
    """Write an operand with the members along dimension 0 (a shared one as it is)."""
    graph = writer.graph
    match operand:
        case Pack() | Shared():
            return writer.values[operand if isinstance(operand, Pack) else operand.operation]
        case Flags():
            return graph.call_function(batched_layers.members_training, tuple(map(graph.get_attr, operand.names)))
        case Parameters():
            node = graph.get_attr(lowering.names[operand.names])
            node.meta["parameter"] = True
            return node
        case Selected():
            return graph.call_function(batched.select_members, (writer.values[operand.source], operand.dim, count))
        case Gathered():
            return _gathered(operand.operations, lowering, writer)


def _gathered(operations: Sequence[Operation], lowering: Lowering, writer: Writer) -> fx.Node:
    """Write the stack of separate values; where their shapes may come to differ, that is asked first."""
    values = tuple(writer.values[operation] for operation in operations)
    if not all(same_shape(operations[0], other) for other in operations[1:]):
        alike = writer.graph.call_function(batched.have_one_shape, values)
        reason = "the members read tensors of one shape when they were fused"
        writer.graph.call_function(require, (alike, True, reason, lowering.may_restart))
    return writer.graph.call_function(batched.gather_members, values)


def _write_layer(pack: Pack, values: Sequence[fx.Node], lowering: Lowering, writer: Writer) -> fx.Node:
    if pack.operator != "module":
        return write_layer(pack, values, writer.graph)
    vectorized = batched.VectorizedMembers(_template(pack), _in_dims(pack.operands), structured=True)
    return writer.graph.call_module(lowering.add_module(vectorized), tuple(values))


def _template(pack: Pack) -> Template:
    if pack.module is None:
        raise MatchFailure("the members' module is gone")
    return Template(pack.module, pack.arguments, pack.state)


def _in_dims(operands: Sequence[Operand]) -> tuple[int | None, ...]:
    return tuple(0 if is_stacked(operand) else None for operand in operands)


def _write_linear(pack: Pack, lowering: Lowering, writer: Writer) -> fx.Node:
    operands = [_stacked(operand, pack.size, lowering, writer) for operand in pack.operands]
    arguments = (operands[0], operands[1], operands[2] if len(operands) > 2 else None)
    return writer.graph.call_function(_linear_function(pack, lowering.choice), arguments)


def _linear_function(pack: Pack, choice: str) -> Callable[..., Any]:
    if isinstance(pack.operands[1], Shared):
        return F.linear
    shared = isinstance(pack.operands[0], Shared)
    if choice in ("wide", "wide_input_first"):
        return batched.wide_linear if shared else batched.batched_linear
    if choice == "grouped_conv":
        return batched.shared_grouped_linear if shared else batched.grouped_linear
    return batched.shared_batched_linear if shared else batched.batched_linear


def _write_pointwise(pack: Pack, lowering: Lowering, writer: Writer) -> fx.Node:
    values = [_stacked(operand, pack.size, lowering, writer) for operand in pack.operands]
    aligned = [_aligned(slot, pack, values, writer) for slot in range(len(values))]
    args, kwargs = map_structure(pack.arguments, lambda leaf: aligned[leaf.index] if isinstance(leaf, Slot) else leaf)
    return writer.graph.call_function(function_of(pack.operator, keywords=bool(kwargs)), args, kwargs)


def _aligned(slot: int, pack: Pack, values: Sequence[fx.Node], writer: Writer) -> fx.Node:
    """Give a stacked operand as many dimensions as the widest operand has, behind the members' dimension."""
    if not is_stacked(pack.operands[slot]):
        return values[slot]
    own = pack.operand_ranks[slot]
    flat = not own  # as a parameter of one dimension: anything may be wider
    wider = [i for i, ranks in enumerate(pack.operand_ranks) if i != slot and (flat or not ranks <= own)]
    if not pack.has_dimensions(slot):
        wider = [i for i, ranks in enumerate(pack.operand_ranks) if i != slot and (not ranks or not ranks <= own)]
    stacked = [values[i] for i in wider if is_stacked(pack.operands[i])]
    # A shared vector is no wider than members with a dimension of their own.
    vectors = not any(pack.has_dimensions(i) for i, operand in enumerate(pack.operands) if is_stacked(operand))
    shared = [values[i] for i in wider if _may_be_wider(pack.operands[i], pack.operand_ranks[i], vectors)]
    if not stacked and not shared:
        return values[slot]
    kwargs: dict[str, Argument] = {"shared": tuple(shared)} if shared else {}
    return writer.graph.call_function(batched.align_members, (values[slot], *stacked), kwargs)


def _may_be_wider(operand: Operand, ranks: frozenset[object], vectors: bool) -> bool:
    if not isinstance(operand, Shared):
        return False
    is_number = isinstance(operand.operation.example, (int, float))
    return bool(ranks) or (vectors and not is_number)


# -- where members leave -------------------------------------------------------------------------------------------


def _join_unit(pack: Pack, join: Join, copy: bool) -> Unit:
    def emit(writer: Writer) -> None:
        writer.values[join.root] = _write_join(join, writer.values[pack], writer, copy)

    extra = [addend for addend in join.addends if isinstance(addend, Operation)]
    return Unit(join.root.index, [pack, *extra], [join.root], emit)


def _write_join(join: Join, value: fx.Node, writer: Writer, copy: bool) -> fx.Node:
    graph = writer.graph
    if join.kind != "sum":
        function = batched.stack_members if join.kind == "stack" else batched.concatenate_members
        node = graph.call_function(function, (value, join.dim), {"copy": True} if copy else {})
    else:
        node = graph.call_function(batched.sum_members, (value,))
        for addend in join.addends:
            if isinstance(addend, Operation) or addend != 0:
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

    return Unit(_order(pack), [pack], list(pack.members), emit)


# -- vmap ----------------------------------------------------------------------------------------------------------


def _vmap_unit(lowering: Lowering) -> Unit:
    """Write the whole ensemble as one `torch.func.vmap` over a graph of a single member."""
    packs = lowering.ensemble.packs
    outer = list(dict.fromkeys(o for pack in packs for o in pack.operands if not isinstance(o, Pack)))
    exits = exits_of(lowering.ensemble)

    def emit(writer: Writer) -> None:
        name = lowering.add_module(_vectorized(packs, outer, exits))
        values = [_stacked(operand, lowering.ensemble.size, lowering, writer) for operand in outer]
        result = writer.graph.call_module(name, tuple(values))
        result.meta["origin"] = writer.origin_of(packs[0].members)
        for position, pack in enumerate(exits):
            picked = (
                result if len(exits) == 1 else writer.graph.call_function(function_of("getitem"), (result, position))
            )
            writer.values[pack] = picked

    needs = [key for operand in outer for key in _keys(operand)]
    return Unit(min(_order(pack) for pack in packs), needs, list(exits), emit)


def exits_of(ensemble: Ensemble) -> list[Pack]:
    """Return the packs whose members somebody outside the ensemble reads."""
    inside = {member for pack in ensemble.packs for member in pack.members}
    return [pack for pack in ensemble.packs if any(u not in inside for m in pack.members for u in m.users)]


def _vectorized(packs: Sequence[Pack], outer: Sequence[Operand], exits: Sequence[Pack]) -> nn.Module:
    graph, root = fx.Graph(), nn.Module()
    values: dict[Operand, fx.Node] = {operand: graph.placeholder(f"operand_{i}") for i, operand in enumerate(outer)}
    for number, pack in enumerate(packs):
        slots = [values[operand] for operand in pack.operands]
        if pack.operator == "module":
            root.add_module(f"template_{number}", _template(pack))
            values[pack] = graph.call_module(f"template_{number}", tuple(slots))
            continue
        args, kwargs = map_structure(
            pack.arguments, lambda leaf, slots=slots: slots[leaf.index] if isinstance(leaf, Slot) else leaf
        )
        values[pack] = _write_member(pack, slots, args, kwargs, graph)
    if any(pack.result == "common" for pack in exits):
        raise MatchFailure("somebody else reads a number that the members compute")
    results = tuple(values[pack] for pack in exits)
    graph.output(results[0] if len(results) == 1 else results)
    structured = any(pack.operator == "module" for pack in exits)
    return batched.VectorizedMembers(fx.GraphModule(root, graph, "Member"), _in_dims(outer), structured)


def _write_member(
    pack: Pack, slots: Sequence[fx.Node], args: tuple[Any, ...], kwargs: dict[str, Any], graph: fx.Graph
) -> fx.Node:
    """Write what one member computes."""
    if pack.operator == "batch_norm":
        state = dict(zip(pack.state, slots[-len(pack.state) :], strict=True))
        names = ("running_mean", "running_var", "weight", "bias", "num_batches_tracked", "training")
        options = (pack.options["momentum"], pack.options["eps"])
        return graph.call_function(
            batched_layers.normalize_member, (slots[0], *(state.get(name) for name in names), *options)
        )
    if pack.operator == "linear":
        return graph.call_function(F.linear, args, kwargs)
    if pack.operator in POINTWISE:
        return graph.call_function(function_of(pack.operator, keywords=bool(kwargs)), args, kwargs)
    if pack.function:
        return call(pack.function, args, kwargs, graph)
    raise MatchFailure(f"'{pack.operator}' has no batching rule")

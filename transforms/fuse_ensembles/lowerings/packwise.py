"""Write an ensemble pack by pack, its multilayer perceptrons as one operator each, or all as one `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import Argument

from ....errors import MatchFailure
from ....layers import batched_layers
from ....layers import ensemble as batched
from ....layers.vectorized import VectorizedMembers, graph_of_member
from ....operators import function_of, operator_info
from ..search import Ensemble, Operand, Pack, Parameters, Shared, is_stacked
from .batching_rules import call, filled, write_layer
from .rebuilding import Unit, Writer
from .units import Task, keys_of, members_dims, order_of, stacked, template_of

__all__ = ["Packwise", "Perceptrons", "has_perceptrons", "vmapped"]


@dataclass(frozen=True)
class Packwise:
    """Write an ensemble pack by pack; its linear layers become one function or another of `layers.ensemble`."""

    of_one_input: Callable[..., Tensor]  # what linears become that all read one input
    of_own_inputs: Callable[..., Tensor]  # what other linears become

    def __call__(self, task: Task) -> list[Unit]:
        """Return a unit for each pack; those that may write to the same buffers keep their order."""
        last: dict[Operand, Pack] = {}
        units: list[Unit] = []
        for pack in task.ensemble.packs:
            state = [o for o in pack.operands if isinstance(o, Parameters)] if pack.state else []
            before = {last[operand] for operand in state if operand in last}
            last.update(dict.fromkeys(state, pack))
            units.append(self._unit(pack, before, task))
        return units

    def _unit(self, pack: Pack, before: Collection[Pack], task: Task) -> Unit:
        def emit(writer: Writer) -> None:
            flat = pack.operator == "linear" and not isinstance(pack.operands[1], Shared)
            operands = enumerate(pack.operands)  # linears take their biases flat
            values = [stacked(each, pack.size, task, writer, flat=flat and slot == 2) for slot, each in operands]
            node = self._written(pack, values, task, writer)
            node.meta["origin"] = writer.origin_of(pack.members)
            writer.values[pack] = node

        return Unit(order_of(pack), [*before, *(key for o in pack.operands for key in keys_of(o))], [pack], emit)

    def _written(self, pack: Pack, values: Sequence[fx.Node], task: Task, writer: Writer) -> fx.Node:
        if pack.operator == "linear":
            x, weight, *_ = pack.operands
            own = self.of_one_input if isinstance(x, Shared) else self.of_own_inputs
            bias = values[2] if len(values) > 2 else None
            return writer.graph.call_function(F.linear if isinstance(weight, Shared) else own, (*values[:2], bias))
        if operator_info(pack.operator).elementwise:
            args, kwargs = filled(pack, [_aligned(slot, pack, values, writer) for slot in range(len(values))])
            return writer.graph.call_function(function_of(pack.operator, keywords=bool(kwargs)), args, kwargs)
        if pack.operator != "module":
            return write_layer(pack, values, writer.graph)
        vectorized = VectorizedMembers(template_of(pack), members_dims(pack.operands), structured=True)
        return writer.graph.call_module(task.add_module(vectorized), tuple(values))


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


_ACTIVATIONS = ("relu", "sigmoid", "silu", "tanh")
Perceptron = Sequence[Pack]
"""Linears with one activation between them, in order, each reading nothing but the one before."""


@dataclass(frozen=True)
class Perceptrons:
    """Write the multilayer perceptrons in an ensemble as one operator each."""

    others: Packwise  # how all else is written

    def __call__(self, task: Task) -> list[Unit]:
        """Return a unit for each perceptron, and one for each other pack."""
        found = list(_perceptrons(task.ensemble))
        inside = {pack for perceptron in found for pack in perceptron}
        others = [unit for unit in self.others(task) if inside.isdisjoint(unit.gives)]
        return [*others, *(_unit(perceptron, task) for perceptron in found)]


def has_perceptrons(ensemble: Ensemble) -> bool:
    """Say whether some packs of an ensemble make up multilayer perceptrons."""
    return next(_perceptrons(ensemble), None) is not None


def _unit(perceptron: Perceptron, task: Task) -> Unit:
    linears, activation = perceptron[::2], _activation(perceptron[1])
    first, last = linears[0], linears[-1]

    def emit(writer: Writer) -> None:
        from ....cuda_ops import ensemble_mlp

        x = stacked(first.operands[0], first.size, task, writer)
        layers = [[stacked(o, pack.size, task, writer) for o in pack.operands[1:]] for pack in linears]
        weights, biases = [layer[0] for layer in layers], [layer[1] if layer[1:] else None for layer in layers]
        own: dict[str, Argument] = {"own_inputs": True} if is_stacked(first.operands[0]) else {}
        node = writer.graph.call_function(ensemble_mlp, (x, weights, biases, activation), own)
        node.meta["origin"] = writer.origin_of(last.members)
        writer.values[last] = node

    return Unit(order_of(first), keys_of(first.operands[0]), [last], emit)


def _perceptrons(ensemble: Ensemble) -> Iterator[Perceptron]:
    """Yield the longest chains of linears and activations, two linears at the least."""
    following: dict[Operand, Pack] = {
        pack.operands[0]: pack for pack in ensemble.packs if isinstance(pack.operands[0], Pack)
    }
    taken = set[Pack]()
    for pack in ensemble.packs:
        if pack not in taken and _is_layer(pack):
            found = _chain(pack, following)
            taken.update(found)
            if len(found) > 1:
                yield found


def _chain(first: Pack, following: Mapping[Operand, Pack]) -> Perceptron:
    found, activation = [first], None
    while (between := following.get(found[-1])) is not None and (after := following.get(between)) is not None:
        activation = activation or _activation(between)
        if activation is None or _activation(between) != activation or not _is_layer(after):
            break
        if not (_reads_all(between, found[-1]) and _reads_all(after, between)):
            break
        found += [between, after]
    return found


def _is_layer(pack: Pack) -> bool:
    """Say whether each member is a linear with parameters of its own."""
    return pack.operator == "linear" and all(isinstance(operand, Parameters) for operand in pack.operands[1:])


def _reads_all(reader: Pack, pack: Pack) -> bool:
    """Say whether nothing else reads what a pack gives."""
    return all(user in reader.members for member in pack.members for user in member.users)


def _activation(pack: Pack) -> str | None:
    """Return what the operator calls the activation that a pack computes, or None where it is none, or another one."""
    args, kwargs = pack.arguments
    settings = [*args[1:], *kwargs.values()]
    if pack.operator == "gelu":
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(settings[0] if settings else "none")
    in_place_at_most = all(isinstance(setting, bool) for setting in settings)
    return pack.operator if pack.operator in _ACTIVATIONS and in_place_at_most else None


def vmapped(task: Task) -> list[Unit]:
    """Return the one unit of graph that computes the ensemble as one `torch.func.vmap`."""
    packs = task.ensemble.packs
    outer = list(dict.fromkeys(o for pack in packs for o in pack.operands if not isinstance(o, Pack)))
    inside = {member for pack in packs for member in pack.members}
    exits = [pack for pack in packs if any(u not in inside for m in pack.members for u in m.users)]  # read outside

    def emit(writer: Writer) -> None:
        name = task.add_module(_vectorized(packs, outer, exits))
        values = [stacked(operand, task.ensemble.size, task, writer) for operand in outer]
        result = writer.graph.call_module(name, tuple(values))
        result.meta["origin"] = writer.origin_of(packs[0].members)
        for position, pack in enumerate(exits):
            picked = (
                result if len(exits) == 1 else writer.graph.call_function(function_of("getitem"), (result, position))
            )
            writer.values[pack] = picked

    needs = [key for operand in outer for key in keys_of(operand)]
    return [Unit(min(order_of(pack) for pack in packs), needs, list(exits), emit)]


def _vectorized(packs: Sequence[Pack], outer: Sequence[Operand], exits: Sequence[Pack]) -> nn.Module:
    graph, templates = fx.Graph(), dict[str, nn.Module]()
    values: dict[Operand, fx.Node] = {operand: graph.placeholder(f"operand_{i}") for i, operand in enumerate(outer)}
    for number, pack in enumerate(packs):
        slots = [values[operand] for operand in pack.operands]
        if pack.operator == "module":
            templates[f"template_{number}"] = template_of(pack)
            values[pack] = graph.call_module(f"template_{number}", tuple(slots))
            continue
        args, kwargs = filled(pack, slots)
        values[pack] = _write_member(pack, slots, args, kwargs, graph)
    if any(pack.result == "common" for pack in exits):
        raise MatchFailure("another operation reads a number that the members compute")
    results = tuple(values[pack] for pack in exits)
    graph.output(results[0] if len(results) == 1 else results)
    structured = any(pack.operator == "module" for pack in exits)
    return VectorizedMembers(graph_of_member(templates, graph), members_dims(outer), structured)


def _write_member(
    pack: Pack, slots: Sequence[fx.Node], args: tuple[Any, ...], kwargs: dict[str, Any], graph: fx.Graph
) -> fx.Node:
    if pack.operator == "batch_norm":
        state = dict(zip(pack.state, slots[-len(pack.state) :], strict=True))
        names = ("running_mean", "running_var", "weight", "bias", "num_batches_tracked", "training")
        options = (pack.options["momentum"], pack.options["eps"])
        return graph.call_function(
            batched_layers.normalize_member, (slots[0], *(state.get(name) for name in names), *options)
        )
    if pack.operator == "linear":
        return graph.call_function(F.linear, args, kwargs)
    if operator_info(pack.operator).elementwise:
        return graph.call_function(function_of(pack.operator, keywords=bool(kwargs)), args, kwargs)
    if pack.operator == "derived":
        return graph.call_function(cast("Callable[..., Any]", pack.members[0].node.target), args, kwargs)
    if pack.operator == "view" and not any(isinstance(argument, torch.dtype) for argument in args):
        return graph.call_method("reshape", args, kwargs)  # members may lie among one another in memory
    if pack.function:
        return call(pack.function, args, kwargs, graph)
    raise MatchFailure(f"'{pack.operator}' has no batching rule")

"""Write an ensemble pack by pack, each as one batched operation, or its multilayer perceptrons as one operator each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.node import Argument

from ....layers import ensemble as batched
from ....layers.vectorized import VectorizedMembers
from ....operators import function_of, operator_info
from ..search import Ensemble, Operand, Pack, Parameters, Shared, is_stacked
from .batching_rules import filled, write_layer
from .rebuilding import Unit, Writer
from .units import Task, keys_of, members_dims, order_of, stacked, template_of

__all__ = ["Packwise", "Perceptrons", "has_perceptrons"]


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

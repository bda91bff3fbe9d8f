"""Write the multilayer perceptrons in an ensemble as one operator, `fxopt::ensemble_mlp`, and the rest pack by pack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx.node import Argument

from ..search import Ensemble, Operand, Pack, Parameters, is_stacked
from .packwise import Packwise
from .rebuilding import Unit, Writer
from .units import Task, keys_of, order_of, stacked

__all__ = ["Perceptrons", "has_perceptrons"]

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

"""Optimizers go along: they stay the same objects and train the parameters of the other form of a model."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from ....compat.optimizers import carry_hooks_of_steps
from ....errors import StateError, UsageError, expect
from ....runtime.record import Record, record_of
from ....runtime.state import all_parameters, check_type, is_element_wise, leave_to_other_ranks, translate_optimizer
from ....tracing.isolation import Holding
from .added import adopt_added, release_added
from .gate import reset_form
from .restoration import rebuilt
from .successors import Successors

__all__ = [
    "HeldOptimizer",
    "all_or_nothing",
    "check_optimizer",
    "held_optimizers",
    "move_forward",
    "move_optimizer",
    "move_optimizer_back",
    "names_of",
]

SomeOptimizer = TypeVar("SomeOptimizer", bound=Optimizer)


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Raise UsageError for no optimizer, StateError for one that is not element-wise or trains nothing of the model."""
    if not isinstance(optimizer, Optimizer):
        given = type(optimizer).__name__
        raise UsageError(
            f"optimizer= takes a torch.optim.Optimizer over the model's parameters, not {given}; "
            "give one of several, and move the others with fxopt.translate_optimizer(other, fast)"
        )
    check_type(optimizer)
    if set(map(id, _held_by(optimizer))).isdisjoint(map(id, model.parameters())):
        raise StateError(
            f"this {type(optimizer).__name__} holds none of the model's parameters; build it on the model that you "
            "give: Adam(model.parameters())"
        )


def move_forward(optimizer: Optimizer, model: nn.Module, fast: nn.Module, record: Record) -> None:
    """Let an optimizer of a model train the one that was made of it; a StateError changes nothing."""
    earlier, names, states = record_of(model), record.original_names(_held_by(optimizer)), dict[str, dict[str, Any]]()
    with all_or_nothing(optimizer):
        if earlier is not None:  # the optimizer knows what was made of the original parameters
            original = rebuilt(model, earlier)
            states = _moved_back(optimizer, model, earlier, original)
            names = names_of(original)
        translate_optimizer(optimizer, names, record.state_map, all_parameters(fast))
        adopt_added(optimizer, fast, states)
    leave_to_other_ranks(optimizer, fast)


def move_optimizer(optimizer: SomeOptimizer, fast: nn.Module, record: Record) -> SomeOptimizer:
    """Let an optimizer of the original model train the optimized one: the public `translate_optimizer`.

    Raises UsageError for what is no optimizer, StateError where it cannot be moved; nothing is changed then.
    """
    expect(optimizer, Optimizer, "optimizer", "a torch.optim.Optimizer")
    names, parameters = record.original_names(_held_by(optimizer)), dict(fast.named_parameters())
    return adopt_added(translate_optimizer(optimizer, names, record.state_map, parameters), fast)


def move_optimizer_back(optimizer: Optimizer, fast: nn.Module, record: Record, original: nn.Module) -> None:
    """Let an optimizer train the model that was restored, in its old form; a StateError changes nothing."""
    _moved_back(optimizer, fast, record, original)
    reset_form(optimizer)


def _moved_back(
    optimizer: Optimizer, fast: nn.Module, record: Record, original: nn.Module
) -> dict[str, dict[str, Any]]:
    """Return what an optimizer knew of parameters that passes had added, and let it go on with the restored model."""
    parameters = dict(original.named_parameters())
    with all_or_nothing(optimizer):
        states = release_added(optimizer, fast)
        translate_optimizer(optimizer, names_of(fast), record.state_map, parameters, direction="backward")
    return states


def names_of(model: nn.Module) -> dict[int, str]:
    """Return id -> name for a model's parameters."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


@contextmanager
def all_or_nothing(optimizer: Optimizer) -> Generator[None]:
    """Put the optimizer's groups and state back after an error in one of several moves."""
    groups: list[dict[str, Any]] = [{key: copy.copy(v) for key, v in g.items()} for g in optimizer.param_groups]
    state = dict(optimizer.state)
    try:
        yield
    except BaseException:
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)
        optimizer.state.clear()
        optimizer.state.update(state)
        raise


# -- those that the model holds ---------------------------------------------------------------------------------------


@dataclass
class HeldOptimizer:
    """An optimizer that one model holds, and that of the other model in the same places: a copy, or the same."""

    path: str
    original: Optimizer
    own: Optimizer
    places: list[Holding] = field(default_factory=list[Holding])

    @property
    def is_copy(self) -> bool:
        return self.own is not self.original

    def fits(self, successors: Successors) -> bool:
        """Say whether it may look at whole tensors, but none that it holds has another form now."""
        mine = [each for each in _held_by(self.original) if id(each) in successors.names]
        return not is_element_wise(type(self.original)) and all(map(successors.is_unchanged, mine))

    def hold_originals(self) -> None:
        """Let a copy hold the parameters that the original holds, with its own state: from there it can move."""
        pairs = zip(_held_by(self.own), _held_by(self.original), strict=True)
        self._hold({id(one): other for one, other in pairs})

    def hold_successors(self, successors: Successors) -> None:
        """Let a copy, which holds what the original holds, hold the parameters in their places, of the same form."""
        pairs = ((each, successors.only_one(each)) for each in _held_by(self.own) if id(each) in successors.names)
        self._hold({id(one): other for one, other in pairs if other is not None})

    def _hold(self, instead: Mapping[int, Tensor]) -> None:
        for group in self.own.param_groups:
            group["params"][:] = [instead.get(id(each), each) for each in group["params"]]
        state = {instead.get(id(each), each): known for each, known in self.own.state.items()}
        self.own.state.clear()
        self.own.state.update(state)

    def check_replaceable(self) -> None:
        """Raise StateError for places where nothing else can be put: in a tuple, say."""
        for place in self.places:
            if place.put is None:
                raise StateError(f"the model holds its optimizer in '{place.path}', where nothing can be replaced")

    def carry_hooks(self, instead: Mapping[int, Any]) -> None:
        """Give a copy the hooks on steps and states; they reach what takes the place of objects by `instead`."""
        if self.is_copy:
            carry_hooks_of_steps(self.original, self.own, {**instead, id(self.original): self.own})

    def replace(self, optimizer: Optimizer) -> None:
        """Put another optimizer in its places."""
        for place in self.places:
            if place.put is not None:
                place.put(optimizer)


def held_optimizers(holdings: Iterable[Holding], model: nn.Module) -> list[HeldOptimizer]:
    """Return the optimizers among what a model holds that train something of it."""
    parameters = set(map(id, model.parameters()))
    found: dict[int, HeldOptimizer] = {}
    for each in holdings:
        if isinstance(each.one, Optimizer) and not parameters.isdisjoint(map(id, _held_by(each.one))):
            found.setdefault(id(each.one), HeldOptimizer(each.path, each.one, each.other)).places.append(each)
    return list(found.values())


def _held_by(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

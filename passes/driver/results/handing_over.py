"""What the user gets: the optimized model or the restored one, and with it all that trains or lists its parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from ....compat import modules_by_name
from ....compat.optimizers import rebind_hooks_of_steps
from ....errors import StateError
from ....runtime.record import Record, record_of, state_map_of
from ....runtime.state import RECORD_KEY, StateMap, is_element_wise, translate_optimizer
from ....tracing.isolation import held_in
from ...pipeline import ranks
from ..context import Request
from .added import live_optimizers
from .choosing import choose_form
from .optimizer_moves import (
    HeldOptimizer,
    all_or_nothing,
    check_optimizer,
    held_optimizers,
    move_forward,
    move_optimizer_back,
    names_of,
)
from .restoration import carry_hooks, rebuilt, transplanted
from .successors import ADVICE, Change, Successors, moved_holdings, refuse_averages

__all__ = ["hand_over", "restored"]


def restored(model: nn.Module, record: Record, optimizer: Optimizer | None = None) -> nn.Module:
    """Return the original structure with the current weights, buffers, modes, hooks, attributes and optimizers.

    Raises UsageError for what is no optimizer, StateError where one cannot move; nothing is changed then.
    """
    if optimizer is not None:
        check_optimizer(optimizer, model)
    original = rebuilt(model, record)

    def back(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return record.state_map.backward(tensors, warn=False)

    def move(each: Optimizer) -> None:
        move_optimizer_back(each, model, record, original)

    successors = Successors.between(model, record.state_map, original, None, back)
    held = _Held.of(model, original, successors)
    held.move(move, optimizer)
    held.settle(original, optimizer)
    carry_hooks(model, original)
    return original


@dataclass
class _Held:
    """What a model holds besides its parameters, on the way to another form of it, maybe itself (`is_inplace`)."""

    optimizers: Sequence[HeldOptimizer]
    changes: Sequence[Change]
    successors: Successors
    instead: Mapping[int, Any]
    is_inplace: bool

    @classmethod
    def of(cls, model: nn.Module, result: nn.Module, successors: Successors) -> _Held:
        holdings = held_in(model, result)
        others = modules_by_name(result)
        instead: dict[int, Any] = {id(each.one): each.other for each in holdings if not isinstance(each.one, Optimizer)}
        instead |= {id(each): others[name] for name, each in modules_by_name(model).items() if name in others}
        optimizers, changes = held_optimizers(holdings, model), moved_holdings(holdings, successors)
        return cls(optimizers, changes, successors, instead, result is model)

    def move(self, move: Callable[[Optimizer], None], given: Optimizer | None) -> None:
        """Move all optimizers, the given one included, or none, with a StateError."""
        for each in self.optimizers:
            if each.original is given and each.is_copy:
                each.check_replaceable()
        others = [each for each in self.optimizers if each.original is not given]
        with ExitStack() as around:
            for each in others:
                around.enter_context(all_or_nothing(each.own))
                self._move(each, move)
            if given is not None:
                move(given)

    def _move(self, held: HeldOptimizer, move: Callable[[Optimizer], None]) -> None:
        fits = held.fits(self.successors)
        if held.is_copy:
            held.hold_originals()
            if fits:
                held.hold_successors(self.successors)
        elif not self.is_inplace:
            raise StateError(f"the model's '{held.path}' is not copied with it: give it as optimizer=. {ADVICE}")
        if fits:
            return
        try:
            move(held.own)
        except StateError as error:
            raise StateError(f"the model's '{held.path}' cannot move: {error}. {ADVICE}") from error

    def settle(self, result: nn.Module, given: Optimizer | None) -> None:
        """Put the given optimizer and all parameters in their places, in the result that has its final parameters."""
        now = dict(result.named_parameters())
        names = {id(parameter): name for name, parameter in self.successors.named.items()}
        for change in self.changes:
            change(lambda parameter: now[names[id(parameter)]])
        for each in self.optimizers:
            if given is not None and each.original is given and each.is_copy:
                each.replace(given)
            else:
                each.carry_hooks(self.instead)
        if given is not None:
            rebind_hooks_of_steps(given, self.instead)


def hand_over(
    model: nn.Module, fast: nn.Module, request: Request, optimizer: Optimizer | None, *, inplace: bool
) -> nn.Module:
    """Return an optimized copy, or `model` turned into it; its optimizers go with it, in a faster form if there is one.

    Raises StateError, with nothing changed, where an optimizer or what the model holds of its parameters cannot move.
    """
    record = cast("Record", record_of(fast))
    refuse_averages(model, fast)
    held = _Held.of(model, model if inplace else fast, _successors(model, fast, record))
    held.move(lambda each: move_forward(each, model, fast, record), optimizer)
    if optimizer is not None:
        _choose_form(fast, record, optimizer, request)
    record.lost_hooks.extend(carry_hooks(model, fast))
    if inplace:
        names, before = names_of(fast), list(model.parameters())
        transplanted(model, fast)
        own = [each.own for each in held.optimizers]
        for each in dict.fromkeys(own if optimizer is None else [*own, optimizer]):
            if is_element_wise(type(each)):  # what no pass changed is the user's own again
                translate_optimizer(each, names, StateMap(), dict(model.named_parameters()))
        held.settle(model, optimizer)
        _warn_of_forgotten(before, model)
        return model
    held.settle(fast, optimizer)
    return fast


def _successors(model: nn.Module, fast: nn.Module, record: Record) -> Successors:
    earlier = state_map_of(model)

    def forward(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return record.state_map.forward(
            tensors if earlier is None else earlier.backward(tensors, warn=False), strict=False
        )

    return Successors.between(model, earlier, fast, record.state_map, forward)


def _choose_form(fast: nn.Module, record: Record, optimizer: Optimizer, request: Request) -> None:
    """Let an optimizer take its steps in the form that is fastest, or that the plan names, and note that."""
    plan = request.plan
    choice = choose_form(
        optimizer, fast, check=request.verify, measure=bool(request.measure) and plan is None,
        decided=None if plan is None else plan.optimizer_form, ranks=ranks() if plan is None else None,
    )  # fmt: skip
    decided = replace(record.plan, optimizer_form=choice.form)
    vars(fast)[RECORD_KEY] = record.changed(decided, optimizer=choice.to_json())


def _warn_of_forgotten(before: Iterable[nn.Parameter], model: nn.Module) -> None:
    """Warn of optimizers that still hold parameters which were merged in place: they train nothing any more."""
    now = set(map(id, model.parameters()))
    gone = {id(parameter) for parameter in before if id(parameter) not in now}
    for optimizer in live_optimizers() if gone else ():
        held = sum(id(parameter) in gone for group in optimizer.param_groups for parameter in group["params"])
        if held:
            warnings.warn(
                f"this {type(optimizer).__name__} holds {held} parameters that were merged into others, and does not "
                "train them any more: move it by fxopt.translate_optimizer(optimizer, model), or give it to optimize "
                "as optimizer=",
                stacklevel=4,
            )

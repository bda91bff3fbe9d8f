"""Optimizers that go with a model: into its optimized form, and back to the original one."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...errors import StateError, UsageError
from ..state import StateMap, check_type, translate_optimizer
from .record import Record, record_of
from .restoration import restored, transplanted

__all__ = ["check_optimizer", "handed_over", "moved_back"]


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Refuse, before anything is done, what cannot move with a model.

    Raises:
        UsageError: it is no optimizer.
        StateError: it is none of those that work element by element, or trains nothing of the model.
    """
    if not isinstance(optimizer, Optimizer):
        given = type(optimizer).__name__
        raise UsageError(f"optimizer= takes a torch.optim.Optimizer over the model's parameters, not {given}")
    check_type(optimizer)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(map(id, model.parameters())):
        raise StateError(
            f"this {type(optimizer).__name__} holds none of the model's parameters; build it on the model that you "
            "give: Adam(model.parameters())"
        )


def handed_over(model: nn.Module, fast: nn.Module, optimizer: Optimizer | None, *, inplace: bool) -> nn.Module:
    """Return what the user gets of an optimized copy: it, or `model` turned into it; its optimizer goes with it.

    Raises:
        StateError: the optimizer cannot move; neither it nor `model` is changed then.
    """
    if optimizer is not None:
        _move(optimizer, model, fast)
    if not inplace:
        return fast
    names, before = _names(fast), list(model.parameters())
    transplanted(model, fast)
    if optimizer is not None:
        # What no pass changed is the user's own again.
        translate_optimizer(optimizer, names, StateMap(), dict(model.named_parameters()))
    _warn_of_forgotten(before, model)
    return model


def _move(optimizer: Optimizer, model: nn.Module, fast: nn.Module) -> None:
    record, earlier = _required(fast), record_of(model)
    names = record.original_names()
    with _all_or_nothing(optimizer):
        if earlier is not None:  # the optimizer knows what was made of the original parameters
            original = restored(model, earlier)
            _move_back(optimizer, model, earlier, original)
            names = _names(original)
        translate_optimizer(optimizer, names, record.state_map, dict(fast.named_parameters()))


def moved_back(optimizer: Optimizer, fast: nn.Module, original: nn.Module) -> None:
    """Let an optimizer of an optimized model train the one that was restored from it.

    Raises:
        UsageError: it is no optimizer.
        StateError: it cannot be moved; nothing is changed then.
    """
    check_optimizer(optimizer, fast)
    _move_back(optimizer, fast, _required(fast), original)


def _move_back(optimizer: Optimizer, fast: nn.Module, record: Record, original: nn.Module) -> None:
    parameters = dict(original.named_parameters())
    translate_optimizer(optimizer, _names(fast), record.state_map, parameters, direction="backward")


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _required(model: nn.Module) -> Record:
    record = record_of(model)
    if record is None:
        raise StateError(f"this {type(model).__name__} was not optimized by fxopt")
    return record


@contextmanager
def _all_or_nothing(optimizer: Optimizer) -> Generator[None]:
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


def _warn_of_forgotten(before: Iterable[nn.Parameter], model: nn.Module) -> None:
    """Warn of optimizers that still hold parameters which were merged in place: they train nothing any more."""
    now = set(map(id, model.parameters()))
    gone = {id(parameter) for parameter in before if id(parameter) not in now}
    for optimizer in _optimizers() if gone else ():
        held = sum(id(parameter) in gone for group in optimizer.param_groups for parameter in group["params"])
        if held:
            warnings.warn(
                f"this {type(optimizer).__name__} holds {held} parameters that were merged into others, and does not "
                "train them any more: move it by fxopt.translate_optimizer(optimizer, model), or give it to optimize "
                "as optimizer=",
                stacklevel=4,
            )


def _optimizers() -> list[Optimizer]:
    """Return every optimizer that is alive in this process."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]

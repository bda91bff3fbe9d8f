"""Parameters that a pass added to a model, and the optimizers that are to train them."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ....compat import modules_by_name, own_parameters
from ....runtime.state import ADDED_TENSORS
from ....runtime.values import qualified

__all__ = ["adopt_added", "live_optimizers", "release_added"]

SomeOptimizer = TypeVar("SomeOptimizer", bound=Optimizer)
State = dict[str, Any]


def adopt_added(optimizer: SomeOptimizer, model: nn.Module, states: Mapping[str, State] | None = None) -> SomeOptimizer:
    """Let an optimizer, in place, train the parameters that passes added, unless another optimizer does.

    Each joins the group of the nearest parameters, else the first; `states`: what it knew of each before.
    """
    added = _added(model)
    others = [each for each in live_optimizers() if each is not optimizer] if added else []
    held = {id(p) for each in (optimizer, *others) for group in each.param_groups for p in group["params"]}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    joined = [
        (name, parameter, max(optimizer.param_groups, key=lambda group, name=name: _nearness(name, group, names)))
        for name, parameter in added.items()
        if id(parameter) not in held
    ]
    for name, parameter, group in joined:
        _insert(group, name, parameter, names)
        optimizer.state.update(_state(optimizer, group, parameter, (states or {}).get(name)))
    return optimizer


def release_added(optimizer: Optimizer, model: nn.Module) -> dict[str, State]:
    """Take added parameters out of an optimizer, in place, and return what it knew of them, by name."""
    names, states = {id(parameter): name for name, parameter in _added(model).items()}, dict[str, State]()
    for group in optimizer.param_groups if names else ():
        kept = [number for number, parameter in enumerate(group["params"]) if id(parameter) not in names]
        for parameter in group["params"]:
            if id(parameter) in names:
                states[names[id(parameter)]] = optimizer.state.pop(parameter, {})
        for key in {"params", "param_names"} & group.keys():
            group[key][:] = [group[key][number] for number in kept]
    return states


def live_optimizers() -> list[Optimizer]:
    """Return every optimizer that is alive in this process."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]


def _added(model: nn.Module) -> dict[str, nn.Parameter]:
    found: dict[str, nn.Parameter] = {}
    for path, module in modules_by_name(model).items():
        own = own_parameters(module)
        for name in vars(module).get(ADDED_TENSORS, ()):
            parameter = own.get(name)
            if parameter is not None:
                found[qualified(path, name)] = parameter
    return found


def _nearness(name: str, group: Mapping[str, Any], names: Mapping[int, str]) -> tuple[int, bool]:
    """Return how much of its path the nearest of a group's parameters shares with a name, and if it is called alike."""
    near = (names[id(parameter)] for parameter in group["params"] if id(parameter) in names)
    return max((_shared(name, other) for other in near), default=(-1, False))


def _shared(name: str, other: str) -> tuple[int, bool]:
    (*path, last), (*others, other_last) = name.split("."), other.split(".")
    pairs = enumerate(zip(path, others, strict=False))
    return next((at for at, (one, two) in pairs if one != two), min(len(path), len(others))), last == other_last


def _insert(group: dict[str, Any], name: str, parameter: nn.Parameter, names: Mapping[int, str]) -> None:
    """Put a parameter into a group in the model's order: saved optimizer states know parameters by position."""
    rank = {known: number for number, known in enumerate(names)}
    later = (at for at, each in enumerate(group["params"]) if rank.get(id(each), -1) > rank[id(parameter)])
    at = next(later, len(group["params"]))
    group["params"].insert(at, parameter)
    if "param_names" in group:
        group["param_names"].insert(at, name)


def _state(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter, known: State | None
) -> dict[Tensor, State]:
    """Return what an optimizer is to know of a parameter before its first step: Adagrad alone knows something."""
    if known:
        return {parameter: known}
    if not isinstance(optimizer, torch.optim.Adagrad):
        return {}
    start = group["initial_accumulator_value"]
    fresh = torch.optim.Adagrad([parameter], initial_accumulator_value=start)
    return {parameter: fresh.state[parameter]}

"""Steps on copies: how long each form of an optimizer takes, and whether it computes the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..verification import Tolerance, distance, rounding
from .forms import set_form

__all__ = ["deviation", "stepping"]

_ELEMENTS = 2**22
"""So many at most are stepped on: with gradients and moments more than caches hold, as of a whole model."""

_OF_ONE = 2**20
"""A tensor with more elements is as slow for each of them as one with so many."""

_OF_ONE_COMPARED = 2**12
_STEPS = 3
_OWN_ERRORS = 4.0
"""As of rewrites, of a form: it may err so many times as much as the one that is there, and units in the last place."""

_OF_GRADIENTS = 1e-2

Group = tuple[dict[str, Any], list[Tensor]]
"""The options of a group, and the tensors that stand for its parameters."""


def stepping(optimizer: Optimizer, form: str) -> Callable[[], object]:
    """Return a function that makes one step on copies of a part of the parameters: of every second, third, ...

    The sizes of all of them are there in the same mixture. A gradient has random numbers.
    """
    groups = _groups(optimizer, _OF_ONE)
    sizes = sorted((tensor.numel(), at, n) for at, (_, each) in enumerate(groups) for n, tensor in enumerate(each))
    every = 1
    while every < len(sizes) and sum(size for size, *_ in sizes[::every]) > _ELEMENTS:
        every += 1
    kept = {(at, n) for _, at, n in sizes[::-every]}
    parts = [
        (options, [tensor.clone() for n, tensor in enumerate(each) if (at, n) in kept])
        for at, (options, each) in enumerate(groups)
    ]
    trial = _optimizer(optimizer, [part for part in parts if part[1]], form)
    _set_gradients(trial, 0)
    return trial.step


def deviation(optimizer: Optimizer, form: str) -> tuple[float, str]:
    """Return the largest error of steps in a form, relative to the scale of each tensor, and what is wrong, or "".

    They are compared with steps in float64 of the form that is there, and may err four times as much as it does.
    """
    groups = _groups(optimizer, _OF_ONE_COMPARED)
    wide = [(options, [tensor.double() for tensor in tensors]) for options, tensors in groups]
    pairs = zip(
        *(_after(optimizer, each, how) for each, how in ((wide, ""), (groups, ""), (groups, form))), strict=True
    )
    errors = [0.0]
    for exact, own, new in pairs:
        off = (own.double() - exact).abs().max().nan_to_num().item() if own.numel() else 0.0
        found = distance(exact, new.double(), Tolerance(0.0, _OWN_ERRORS * off + rounding(own).absolute))
        if found.problem:
            return found.error, found.problem
        errors.append(found.error)
    return max(errors), ""


def _groups(optimizer: Optimizer, most: int) -> list[Group]:
    """Return the groups with parts of their trainable parameters, [elements]; nothing is copied yet if it need not."""
    return [
        (
            {name: value for name, value in group.items() if name not in ("params", "param_names")},
            [each.detach().reshape(-1)[:most] for each in group["params"] if each.requires_grad and each.numel()],
        )
        for group in optimizer.param_groups
    ]


def _optimizer(like: Optimizer, groups: Sequence[Group], form: str) -> Optimizer:
    """Return an optimizer over tensors, with other options for each group of them, in a form."""
    listed = [{**copy.deepcopy(options), "params": [nn.Parameter(t) for t in tensors]} for options, tensors in groups]
    make: Any = type(like)
    trial: Optimizer = make([group for group in listed if group["params"]])
    set_form(trial, form)
    return trial


def _set_gradients(trial: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in _parameters(trial):
        numbers = torch.randn(parameter.shape, generator=generator) * _OF_GRADIENTS
        parameter.grad = numbers.to(parameter)


def _after(like: Optimizer, groups: Sequence[Group], form: str) -> Iterator[Tensor]:
    """Yield copies of parameters as several steps leave them, and what the optimizer knows of them then."""
    trial = _optimizer(like, [(options, [tensor.clone() for tensor in tensors]) for options, tensors in groups], form)
    for seed in range(_STEPS):
        _set_gradients(trial, seed)
        trial.step()
    for parameter in _parameters(trial):
        yield parameter.detach()
        state = trial.state[parameter]
        yield from (state[name].cpu() for name in sorted(state) if isinstance(state[name], Tensor))


def _parameters(trial: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in trial.param_groups for parameter in group["params"])

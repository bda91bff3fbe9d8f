"""Choose the form of an optimizer's steps that takes the least time and computes the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from ....operators import is_dense
from ...kinds import allowed_error
from ...pipeline import Ranks
from ...timing import time_candidates
from ...verification import Tolerance, distance
from .gate import forms_of, has_flags, has_plain_options, reset_form, set_form

__all__ = ["Choice", "choose_form"]

_SECONDS = 0.1  # how long forms are raced, if more than a few rounds of steps are made in it at all
_ELEMENTS = 2**22
"""So many at most are stepped on: with gradients and moments more than caches hold, as of a whole model."""
_OF_ONE = 2**20  # a tensor with more elements is as slow for each of them as one with so many
_OF_ONE_COMPARED = 2**12
_STEPS = 3
_OF_GRADIENTS = 1e-2
Group = tuple[dict[str, Any], list[Tensor]]
"""The options of a group, and the tensors that stand for its parameters."""


@dataclass(frozen=True)
class Choice:
    """What became of an optimizer's steps."""

    kind: str
    form: str = ""  # of its steps from now on, `fused` or `foreach`; "": what it was
    reason: str = ""  # why it stayed what it was
    error: float | None = None  # beside float64, relative to the scale of each tensor; None: not compared
    speedup: float | None = None
    forms: Mapping[str, float] = field(default_factory=dict[str, float])  # how many times faster each was

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)


def choose_form(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    check: bool = True,
    measure: bool = True,
    decided: str | None = None,
    ranks: Ranks | None = None,
) -> Choice:
    """Let an optimizer, in place, take its steps in its fastest form; `reset_form` undoes it. What its user set stays.

    On several ranks all take the form of rank 0, to stay equal to the last bit; one `decided` by a plan is not timed.
    """
    reset_form(optimizer)
    choice = _refused(optimizer, model)
    if choice is None:
        choice = _of_plan(optimizer, decided) if decided is not None or not measure else _fastest(optimizer, check)
    if ranks is not None and decided is None and measure:
        choice = _agreed(choice, ranks)
    if choice.form:
        set_form(optimizer, choice.form)
    return choice


def _refused(optimizer: Optimizer, model: nn.Module) -> Choice | None:
    """Return why an optimizer stays as it is before any step is tried."""
    parameters: list[Tensor] = [each for group in optimizer.param_groups for each in group["params"]]
    kind, reason = type(optimizer).__name__, ""
    if getattr(optim, kind, None) is not type(optimizer):
        reason = f"{kind} is no class of torch.optim itself: its steps may do more than another form of them"
    elif any(map(has_flags, (*optimizer.param_groups, optimizer.defaults))):
        reason = "you set fused or foreach; leave both out to have the form chosen"
    elif not all(map(has_plain_options, optimizer.param_groups)):
        reason = "it is differentiable or capturable, or an option is a tensor"
    elif any(type(each) not in (Tensor, nn.Parameter) or not each.is_floating_point() for each in parameters):
        reason = "a parameter is sharded or has no floating-point numbers"
    elif not all(map(is_dense, parameters)):
        reason = "a parameter is a part of other memory"
    elif any(each.is_meta for each in parameters) or not any(each.requires_grad for each in parameters):
        reason = "its parameters have no numbers yet, or none is trained"
    elif any(_is_sparse(each) for each in (*model.modules(), *parameters)):
        reason = "gradients of an embedding are sparse"
    return Choice(kind, reason=reason) if reason else None


def _is_sparse(each: nn.Module | Tensor) -> bool:
    """Say whether a module gives sparse gradients, or a parameter has one."""
    if isinstance(each, nn.Module):
        return isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse
    return each.grad is not None and each.grad.layout is not torch.strided


def _of_plan(optimizer: Optimizer, decided: str | None) -> Choice:
    """Return what a plan says, as far as it can be done here."""
    kind = type(optimizer).__name__
    if not decided:
        return Choice(kind, reason="nothing was measured" if decided is None else "the plan leaves it")
    steps, reason = _steps(optimizer, decided)
    return Choice(kind, decided) if steps is not None else Choice(kind, reason=f"no {decided} form here: {reason}")


def _fastest(optimizer: Optimizer, check: bool) -> Choice:
    """Race all forms, and return the fastest one that computes the same."""
    kind = type(optimizer).__name__
    racing: dict[str, Callable[[], object]] = {}
    reason = ""
    for form in forms_of(optimizer):
        steps, why = _steps(optimizer, form)
        if steps is not None:
            racing[form] = steps
        reason = reason or why
    if len(racing) < 2 or "" not in racing:
        return Choice(kind, reason=f"its steps could not be tried: {reason}" if reason else "it has one form here")
    timings = time_candidates(racing, seconds=_SECONDS)
    forms = {form: round(timings.ratio("", form).mid, 3) for form in racing if form}
    left, wrong = list(racing), ""
    while (form := timings.fastest(left)) != "":
        error, reason = deviation(optimizer, form) if check else (None, "")
        if not reason:
            return Choice(kind, form, error=error, speedup=forms[form], forms=forms)
        wrong = f"{form}: {reason}"
        left.remove(form)
    return Choice(kind, reason=wrong or "no form is faster", forms=forms)


def _steps(optimizer: Optimizer, form: str) -> tuple[Callable[[], object] | None, str]:
    """Return a function that makes a step in a form on copies; or None, and why the optimizer has no such form here."""
    if form not in forms_of(optimizer):
        return None, f"{type(optimizer).__name__} has none"
    try:
        steps = stepping(optimizer, form)
        steps()
    except (RuntimeError, ValueError, TypeError) as error:  # a device, a dtype, a rate that is a tensor
        return None, str(error).partition("\n")[0]
    return steps, ""


def _agreed(choice: Choice, ranks: Ranks) -> Choice:
    """Return what rank 0 has chosen, where every rank could do it; else what was there."""
    able = {"form": choice.form, "forms": [*choice.forms], "reason": choice.reason}
    form, reason = ranks.exchange(able, _judged)
    return choice if form == choice.form else Choice(choice.kind, form, reason=reason, forms=choice.forms)


def _judged(everyone: Any) -> tuple[str, str]:
    first = everyone[0]
    if any(first["form"] not in ("", *each["forms"]) for each in everyone):
        return "", f"another rank cannot take {first['form']} steps"
    return first["form"], "" if first["form"] else f"on rank 0: {first['reason']}"


# -- steps on copies ---------------------------------------------------------------------------------------------------


def stepping(optimizer: Optimizer, form: str) -> Callable[[], object]:
    """Return a function that makes one step, with random gradients, on copies of every nth parameter of any size."""
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
    """Return the largest relative error of steps in a form beside float64, and what is wrong, or ""."""
    groups = _groups(optimizer, _OF_ONE_COMPARED)
    wide = [(options, [tensor.double() for tensor in tensors]) for options, tensors in groups]
    pairs = zip(
        *(_after(optimizer, each, how) for each, how in ((wide, ""), (groups, ""), (groups, form))), strict=True
    )
    errors = [0.0]
    for exact, own, new in pairs:
        off = (own.double() - exact).abs().max().nan_to_num().item() if own.numel() else 0.0
        found = distance(exact, new.double(), Tolerance(0.0, allowed_error(off, own, exact, terms=0)))
        if found.reason:
            return found.error, found.reason
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

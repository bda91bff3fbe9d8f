"""Choose the form of an optimizer's steps that takes the least time and computes the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from ...operators import is_dense
from ..pipeline import Ranks
from ..timing import time_candidates
from .forms import forms_of, reset_form, set_form
from .gate import has_flags, has_plain_options
from .trial import deviation, stepping

__all__ = ["Choice", "choose_form"]

_SECONDS = 0.1
"""How long forms are raced, if more than a few rounds of steps are made in it at all."""


@dataclass(frozen=True)
class Choice:
    """What became of an optimizer.

    Attributes:
        kind: its class.
        form: of its steps from now on, `fused` or `foreach`; "" if it is what it was.
        reason: one clause, why it stayed what it was.
        error: the largest one of steps beside float64, relative to the scale of each tensor; None: not compared.
        speedup: of a step.
        forms: how many times faster each form was than what was there.
    """

    kind: str
    form: str = ""
    reason: str = ""
    error: float | None = None
    speedup: float | None = None
    forms: Mapping[str, float] = field(default_factory=dict[str, float])

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
    """Let an optimizer, in place, take its steps in the form that is fastest; `reset_form` undoes it.

    What its user has set stays. Where several processes train, all take the form that rank 0 has chosen: replicas are
    to stay equal to the last bit.

    Args:
        optimizer: over the model's parameters and maybe others.
        model: the one that it trains.
        check: compare the steps of another form with float64.
        measure: choose by time; otherwise nothing but what was `decided` is taken.
        decided: the form that a plan has, which is not chosen again.
        ranks: the processes that train, where there are several.
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
    problem = ""
    for form in forms_of(optimizer):
        steps, why = _steps(optimizer, form)
        if steps is not None:
            racing[form] = steps
        problem = problem or why
    if len(racing) < 2 or "" not in racing:
        return Choice(kind, reason=f"its steps could not be tried: {problem}" if problem else "it has one form here")
    timings = time_candidates(racing, seconds=_SECONDS)
    forms = {form: round(timings.ratio("", form).mid, 3) for form in racing if form}
    left, wrong = list(racing), ""
    while (form := timings.fastest(left)) != "":
        error, problem = deviation(optimizer, form) if check else (None, "")
        if not problem:
            return Choice(kind, form, error=error, speedup=forms[form], forms=forms)
        wrong = f"{form}: {problem}"
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

"""Types: conversions of the model afterwards, and autocast around calls."""

from __future__ import annotations

from typing import Any

import torch
from support.outcomes import Outcome, attempt, kept, loss
from support.samples import Subject
from support.using import use
from torch import Tensor
from torch.utils import _pytree as pytree


def _cast(arguments: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, arguments)


def _converted(subject: Subject, dtype: torch.dtype) -> Outcome:
    model = subject.new()
    converted = attempt(lambda: model.to(dtype) and None)
    with torch.no_grad():
        result = attempt(lambda: model(*_cast(subject.arguments(), dtype)))
    found = {"conversion": converted, "result": result}
    found["backward"] = attempt(lambda: loss(model(*_cast(subject.arguments(), dtype))).backward())
    found.update(kept(subject.gradients(model)))
    found["back"] = attempt(lambda: model.to(torch.float32) and None)
    found["result after"] = attempt(lambda: model(*subject.arguments()))
    return found


@use()
def double_afterwards(subject: Subject) -> Outcome:
    """`.double()`, a step of gradients, and back."""
    return _converted(subject, torch.float64)


@use(tolerance=0.05)
def half_afterwards(subject: Subject) -> Outcome:
    """`.half()`, a step of gradients, and back."""
    return _converted(subject, torch.float16)


@use(tolerance=0.2)
def bfloat16_afterwards(subject: Subject) -> Outcome:
    """`.to(torch.bfloat16)`, a step of gradients, and back."""
    return _converted(subject, torch.bfloat16)


@use()
def double_beforehand(subject: Subject) -> Outcome:
    """A model that is in float64 when it is optimized."""
    arguments = _cast(subject.arguments(), torch.float64)
    model = subject.optimize(subject.build().double(), example_inputs=arguments)
    found = {"result": attempt(lambda: model(*arguments))} if not subject.sample.zeros else {}
    found["backward"] = attempt(lambda: loss(model(*arguments)).backward())
    found["half"] = attempt(lambda: None if subject.sample.zeros else model.float()(*subject.arguments()))
    return found


@use(tolerance=0.1)
def autocast_around(subject: Subject) -> Outcome:
    """Calls and gradients under autocast to bfloat16, then without."""
    model, found = subject.new(), {}
    with torch.autocast("cpu", torch.bfloat16):
        found["result"] = attempt(lambda: model(*subject.arguments()))
        value = attempt(lambda: _loss_kept(model, subject, found))
    found["loss"] = value
    found["after"] = attempt(lambda: model(*subject.arguments()))
    return {**found, **kept(subject.gradients(model))}


def _loss_kept(model: Any, subject: Subject, found: dict[str, Any]) -> Tensor:
    value = loss(_cast(model(*subject.arguments()), torch.float32))
    value.backward()
    return value


@use(tolerance=0.1)
def autocast_without_gradients(subject: Subject) -> Outcome:
    """Calls under autocast without gradients and in inference mode, with parts for which it is off."""
    model, found = subject.new(), {}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found["result"] = attempt(lambda: model(*subject.arguments()))
        with torch.autocast("cpu", enabled=False):
            found["off inside"] = attempt(lambda: model(*subject.arguments()))
        found["sixteen bits in"] = attempt(lambda: model(*_cast(subject.arguments(), torch.bfloat16)))
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        found["float16"] = attempt(lambda: model(*subject.arguments()))
    return found


@use()
def another_default_type(subject: Subject) -> Outcome:
    """Calls while torch's default type is float64."""
    model = subject.new()
    arguments = subject.arguments()
    torch.set_default_dtype(torch.float64)
    try:
        return {"result": attempt(lambda: model(*arguments))}
    finally:
        torch.set_default_dtype(torch.float32)


USES = (
    double_afterwards, half_afterwards, bfloat16_afterwards, double_beforehand, autocast_around,
    autocast_without_gradients, another_default_type,
)  # fmt: skip

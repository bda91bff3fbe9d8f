"""What is known of one kind of layer in two ways of computing it: the error, the gain, and what objects to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...runtime.record import Measured
from ..sites import Cause, Refusal
from ..timing import Interval, time_kind, timing_figures
from ..verification import NATIVE_FACTOR, Tolerance, distance, rounding, scale_of

__all__ = [
    "LEAST_GAIN",
    "Judgement",
    "allowed_error",
    "error_of",
    "figures_of",
    "gain_judgement",
    "no_gain",
    "over_budget",
]

LEAST_GAIN = 1.01
"""What gains less by itself stays as it is; of the rest the whole model tells."""


@dataclass(frozen=True)
class Judgement:
    """What is known of a kind: the relative error of the new way, figures of its time, and what objects to it."""

    error: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])
    objection: str = ""
    cause: Cause = Cause.JUDGED_WRONG

    @property
    def all_figures(self) -> dict[str, Any]:
        """Return the error and what is known of the time as plans have it."""
        return {**Measured(precision_error=self.error).figures(), **self.figures}

    def refusal(self, at: Any) -> Refusal | None:
        """Return it as the refusal of a place; None where nothing objects."""
        return Refusal(self.objection, at, self.cause) if self.objection else None


def allowed_error(error: float, own: Tensor, exact: Tensor, terms: int = 1) -> float:
    """Return how far off results equal but for rounding may be, where the layer itself errs by `error` from `exact`:
    a few times that, units in the last place, and what sums of so many `terms` differ by that are added in another
    order, the square root of their number. `terms` is 0 where both ways add alike.
    """
    summed = math.sqrt(terms) * torch.finfo(own.dtype).eps * scale_of(exact) if terms else 0.0
    return NATIVE_FACTOR * error + rounding(own).absolute + summed


def error_of(expected: Any, found: Any) -> float:
    """Return the largest difference between tensors of floats in two results, relative to the scale of each."""
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(found), strict=True)
    floats = ((old, new) for old, new in pairs if isinstance(old, Tensor) and old.is_floating_point())
    return max((distance(old, new, Tolerance(0.0, math.inf)).error for old, new in floats), default=0.0)


def over_budget(error: float, budget: float) -> str:
    """Return why results with an error are not to be had within a budget, or ""."""
    return "" if error <= budget else f"it errs by {error:.2g} of its scale, more than the budget of {budget:g}"


def figures_of(
    before: Sequence[Callable[[], object]], after: Sequence[Callable[[], object]], *, cold: bool
) -> dict[str, Any]:
    """Time layers of a kind in turn, in both ways, and return figures of one: in use, weights are not cached."""
    with torch.no_grad():
        timings = time_kind(lambda: _run(before), lambda: _run(after), least=LEAST_GAIN, cold=cold)
    return timing_figures(timings, count=len(before))


def gain_judgement(figures: Mapping[str, Any], error: float = 0.0, *, surely: bool = False) -> Judgement:
    """Return what figures say: less than `LEAST_GAIN` is no gain. `surely`: the whole interval must show it."""
    speed = Interval(figures["speedup_low"], figures["speedup"], figures["speedup_high"])
    return Judgement(error, figures, no_gain(speed, surely=surely), Cause.JUDGED_SLOWER)


def no_gain(speed: Interval, least: float = LEAST_GAIN, *, surely: bool = False) -> str:
    """Return why layers that are so many times faster by themselves stay as they are, or ""; see `gain_judgement`."""
    slow = f"{'no' if speed.mid <= 1.0 else 'not clearly'} faster by itself: {speed.mid:.3g}x"
    gains = (speed.low if surely else speed.mid) > least
    return "" if gains else f"{slow} ({speed.low:.3g} to {speed.high:.3g})"


def _run(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()

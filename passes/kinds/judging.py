"""What is known of one kind of layer in several ways of computing it: the error, the gain, and what objects to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...runtime.record import Measured
from ..sites import Cause, Reason, Refusal
from ..timing import Interval, no_gain, time_kind, timing_figures
from ..verification import NATIVE_FACTOR, Tolerance, distance, rounding, scale_of

__all__ = ["LEAST_GAIN", "Judgement", "allowed_error", "beyond_rounding", "error_of", "figures_of", "over_budget"]

LEAST_GAIN = 1.01
"""What gains less by itself stays as it is; of the rest the whole model tells."""


@dataclass(frozen=True)
class Judgement:
    """What is known of a kind: the relative error of the new way, figures of its time, and in what it is wrong."""

    error: float | None = None
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reason: Reason | None = None
    lowering: str = ""  # of several new ways the one that the figures are of

    @property
    def all_figures(self) -> dict[str, Any]:
        """Return the error and what is known of the time as plans have it."""
        return {**Measured(precision_error=self.error).figures(), **self.figures}

    def reason_against(self, least: float = LEAST_GAIN, *, surely: bool = False, **values: Any) -> Reason | None:
        """Return why layers of the kind stay as they are: the new way is wrong, or gains no more than `least`.

        `surely`: the whole interval must show the gain. `values`: what else led to it.
        """
        if self.reason is not None or not self.figures:
            return self.reason
        return no_gain(Interval.of(self.figures), least, surely=surely, cause=Cause.JUDGED_SLOWER, **values)

    def refusal(self, at: Any, least: float = LEAST_GAIN, *, surely: bool = False) -> Refusal | None:
        """Return the reason as the refusal of a place; None where nothing objects."""
        reason = self.reason_against(least, surely=surely)
        return None if reason is None else Refusal(reason, at)


def allowed_error(error: float, own: Tensor, exact: Tensor, terms: int = 1) -> float:
    """Return how far off results equal but for rounding may be, where the layer itself errs by `error` from `exact`:
    a few times that, units in the last place, and what sums of so many `terms` differ by that are added in another
    order, the square root of their number. `terms` is 0 where both ways add alike.
    """
    summed = math.sqrt(terms) * torch.finfo(own.dtype).eps * scale_of(exact) if terms else 0.0
    return NATIVE_FACTOR * error + rounding(own).absolute + summed


def beyond_rounding(own: Tensor, found: Tensor, exact: Tensor, terms: int = 1) -> tuple[float, float] | None:
    """Return the errors of the new way and of the layer itself, relative to the scale; None where rounding explains
    them, see `allowed_error`.
    """
    error = float((own.double() - exact).abs().max())
    seen = distance(exact, found.double(), Tolerance(0.0, allowed_error(error, own, exact, terms)))
    return (seen.error, error / max(scale_of(exact), torch.finfo(exact.dtype).tiny)) if seen.reason else None


def error_of(expected: Any, found: Any) -> float:
    """Return the largest difference between tensors of floats in two results, relative to the scale of each."""
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(found), strict=True)
    floats = ((old, new) for old, new in pairs if isinstance(old, Tensor) and old.is_floating_point())
    return max((distance(old, new, Tolerance(0.0, math.inf)).error for old, new in floats), default=0.0)


def over_budget(error: float, budget: float) -> Reason | None:
    """Return why results with an error are not to be had within a budget, if so."""
    return None if error <= budget else Reason.of(Cause.JUDGED_WRONG, error=error, budget=budget)


def figures_of(
    before: Sequence[Callable[[], object]],
    after: Sequence[Callable[[], object]],
    *,
    cold: bool,
    least: float | None = LEAST_GAIN,
) -> dict[str, Any]:
    """Time layers of a kind in turn, in both ways, and return figures of one: in use, weights are not cached."""
    with torch.no_grad():
        timings = time_kind(lambda: _run(before), lambda: _run(after), least=least, cold=cold)
    return timing_figures(timings, count=len(before))


def _run(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()

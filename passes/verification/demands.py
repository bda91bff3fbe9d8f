"""The single demands that verification makes; each objects with a clause that a user understands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from .compare import Tolerance, bitwise_problem, distance, drift, form_problem
from .execution import Outcome
from .tolerances import within
from .translation import Objection, Quantities, is_gradient

__all__ = [
    "TooFar",
    "Verdict",
    "check_attachment",
    "check_bits",
    "check_drift",
    "check_expansion",
    "check_finite",
    "check_form",
    "check_not_finite",
    "check_same_quantities",
    "check_sharing",
    "check_structure",
    "drifts",
    "error_around",
    "gaps_and_jumps",
    "judged",
    "largest_gap",
    "overflowing_alike",
    "results_in",
]

_NONE = Tolerance(0.0, 0.0)

_LEARNED = object()
"""There is nothing more to learn."""

_LOUD = 0.1
"""Where rounding moves elements by this part of their size, it is chaos that drifts, and nobody's mistake."""

_ENOUGH = 16
"""A tensor of fewer elements says nothing of how rounding averages out."""


class TooFar(Objection):
    """Two values differ by more than their tolerance; more knowledge of rounding might allow it."""

    def __init__(self, message: str, error: float) -> None:
        super().__init__(message)
        self.error = error


@dataclass(frozen=True)
class Verdict:
    """What verification found.

    Attributes:
        ok: whether the rewrite keeps its promise.
        reason: a sentence that says what is wrong, or "".
        meaning_error: the largest difference between the exact runs, relative to the scale of what differs.
        precision_error: the largest error of the rewritten module in its own types, likewise.
        checked_in: "float64", or the narrower type that had to do.
        is_rounded: whether the rewritten module holds new tensors, computed in its own types: then the exact runs are
            no better than that.
        jump: the largest error of gradients beyond the budget, as those of the original move, too.
    """

    ok: bool
    reason: str
    meaning_error: float = 0.0
    precision_error: float = 0.0
    checked_in: str = "float64"
    is_rounded: bool = False
    jump: float = 0.0


def check_structure(before: Outcome, after: Outcome) -> None:
    """Object to a result of another structure, or to arguments or constants changed in place where they were not."""
    for old, new in zip(before.structure, after.structure, strict=False):
        if old != new:
            raise Objection(f"output structure changed: output{old[0]} was {old[1]}, output{new[0]} is {new[1]}")
    if len(before.structure) != len(after.structure):
        raise Objection(f"output structure changed: {len(before.structure)} parts became {len(after.structure)}")
    for name in before.inputs.keys() - after.inputs.keys():
        raise Objection(f"{name} is no longer changed in place")
    for name in after.inputs.keys() - before.inputs.keys():
        raise Objection(f"{name} is now changed in place")
    for name in sorted(after.left - before.left):
        raise Objection(f"a call leaves {name} changed")
    for name in sorted(after.rewritten - before.rewritten):
        raise Objection(f"the constant {name} is written to, so a second call would compute something else")


def check_sharing(before: Outcome, after: Outcome) -> None:
    """Object to an output that lies in memory in which it did not: whoever writes into it changes more than before."""
    for output, owner in sorted(after.shared - before.shared):
        raise Objection(f"{output} shares memory with {owner}, so writing into it would change {owner} too")


def check_expansion(before: Outcome, after: Outcome) -> None:
    """Object to an output whose elements share memory where they did not: writing into it fails."""
    for name in sorted(after.expanded - before.expanded):
        raise Objection(f"{name} is expanded now, so writing into it would fail")


def check_finite(before: Quantities, after: Quantities) -> None:
    """Object to what is not finite any more."""
    for label, expected in before.items():
        found = after.get(label)
        if not _is_floating(expected) or not _is_floating(found) or expected.shape != found.shape:
            continue
        lost = expected.isfinite() & ~found.isfinite()
        if lost.any():
            raise Objection(f"{label} is {found[lost][0].item()} where it was finite")


def check_not_finite(before: Quantities, after: Quantities) -> None:
    """Object to what is finite where it was not, and to a row that was all finite and is not."""
    for label, expected in before.items():
        found = after.get(label)
        if not _is_floating(expected) or not _is_floating(found) or expected.shape != found.shape:
            continue
        old, new = ~expected.isfinite(), ~found.isfinite()
        if (old & ~new).any():
            raise Objection(f"{label} hides what is not finite: it is {found[old & ~new][0].item()} on an input of NaN")
        rows = (new.flatten(1).any(1) & ~old.flatten(1).any(1)) if expected.dim() > 1 else new & ~old
        if rows.any():
            raise Objection(f"{label} spreads what is not finite to row {int(rows.nonzero()[0])}")


def drifts(exact: Quantities, other: Quantities) -> dict[str, tuple[float, float]]:
    """Return by what part 16-bit floats are larger than the exact ones on the whole, and the noise left besides."""
    found: dict[str, tuple[float, float]] = {}
    for label, expected in exact.items():
        value = other.get(label)
        if not _is_floating(expected) or not _is_floating(value) or expected.shape != value.shape:
            continue
        if expected.numel() >= _ENOUGH and value.dtype.itemsize == 2:
            found[label] = drift(expected, value)
    return found


def check_drift(exact: Quantities, before: Quantities, after: Quantities, chance: Mapping[str, float]) -> None:
    """Object to an error of 16-bit floats that goes one way: rounding goes both, and so averages out.

    Args:
        exact: what is meant.
        before, after: what both sides give in their own types.
        chance: by what part rounding was seen to move a quantity one way.
    """
    old = drifts(exact, before)
    for label, (now, noise) in drifts(exact, after).items():
        was, noise_before = old.get(label, (now, noise))
        if max(noise, noise_before) > _LOUD:
            continue
        random = 4 * max(noise, noise_before) / math.sqrt(exact[label].numel())
        allowed = 4 * max(abs(was), chance.get(label, 0.0)) + 2 * torch.finfo(after[label].dtype).eps + random
        if abs(now) > allowed:
            raise Objection(f"{label} is off by {now:+.1%} on average, in its own types; it was by {was:+.1%}")


def _is_floating(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided


def check_attachment(before: Outcome, after: Outcome) -> None:
    """Object to an output that carries gradients on one side only."""
    for name in sorted(before.attached - after.attached):
        raise Objection(f"{name} no longer carries gradients")
    for name in sorted(after.attached - before.attached):
        raise Objection(f"{name} now carries gradients")


def check_same_quantities(before: Quantities, after: Quantities) -> None:
    """Object to gradients that are lost or new, and to buffers that are gone."""
    for label, expected in before.items():
        found = after.get(label)
        if not is_gradient(label):
            if label not in after:
                raise Objection(f"{label} is gone")
        elif expected is None and found is not None:
            raise Objection(f"{label} is new: there was none")
        elif expected is not None and found is None:
            raise Objection(f"{label} is lost")


def check_form(before: Quantities, after: Quantities) -> None:
    """Object to another shape, dtype or device."""
    for label, expected in before.items():
        problem = form_problem(expected, after[label]) if expected is not None else ""
        if problem:
            raise Objection(f"{label} {problem}")


def results_in(values: Quantities) -> Quantities:
    """Return of all that a run yielded what its caller sees: the outputs, and the arguments that it changed."""
    return {label: value for label, value in values.items() if label.startswith(("output", "input"))}


def error_around(expected: Quantities, found: Quantities, budget: float) -> float:
    """Return the error of which gradients are the response: 4 times that of the results, but no more than `budget`.

    It is 0 where the results are further off than that themselves.
    """
    wanted = results_in(expected)
    try:
        return min(4 * largest_gap(wanted, found, within(wanted, budget), ""), budget)
    except TooFar:
        return 0.0


def check_bits(before: Quantities, after: Quantities) -> None:
    """Object to outputs, arguments or buffers that are not bitwise the same; gradients may be summed differently."""
    for label, expected in before.items():
        problem = "" if is_gradient(label) else bitwise_problem(expected, after[label])
        if problem:
            raise Objection(f"{label} {problem}")


def largest_gap(
    before: Quantities,
    after: Quantities,
    tolerances: Mapping[str, Tolerance],
    where: str,
    *,
    fewer_infinities: bool = False,
) -> float:
    """Return how far two runs are apart, relative to the scale of what differs most.

    Raises:
        TooFar: if any part of them is apart by more than its tolerance.
    """
    largest = 0.0
    for label, expected in before.items():
        found = after[label]
        if isinstance(expected, Tensor) and isinstance(found, Tensor) and expected.shape != found.shape:
            raise Objection(f"{label} {form_problem(expected, found)}")
        apart = distance(expected, found, tolerances.get(label, _NONE), fewer_infinities=fewer_infinities)
        if apart.problem:
            stale = " is stale:" if label.startswith("buffer ") else ""
            raise TooFar(f"{label}{stale} {apart.problem} {where}", apart.error)
        largest = max(largest, apart.error)
    return largest


def gaps_and_jumps(before: Quantities, after: Quantities, tolerances: Mapping[str, Tolerance]) -> tuple[float, float]:
    """Return the largest error among the tensors that keep to their tolerance, and among those that do not."""
    compared = (distance(old, after[label], tolerances[label], fewer_infinities=True) for label, old in before.items())
    kept, beyond = [0.0], [0.0]
    for each in compared:
        (beyond if each.problem else kept).append(each.error)
    return max(kept), max(beyond)


def judged(judge: Callable[[], float], learn: Callable[[], Iterable[object]]) -> tuple[float, TooFar | None]:
    """Return the error, and the objection to it; where there is one, learn about rounding, and judge after each step.

    What is learned only widens tolerances: the first step that is enough gives the verdict that all of them would.
    """
    steps = iter(learn())
    while True:
        try:
            return judge(), None
        except TooFar as objection:
            found = objection
        if next(steps, _LEARNED) is _LEARNED:
            return found.error, found


def overflowing_alike(native: object, exact: Tensor) -> Tensor:
    """Return the exact values, except that what overflowed in the original may overflow again."""
    if not isinstance(native, Tensor) or native.shape != exact.shape:
        return exact
    if not exact.is_floating_point() or exact.layout is not torch.strided:
        return exact
    return torch.where(torch.isfinite(native), exact, native.to(exact.dtype))

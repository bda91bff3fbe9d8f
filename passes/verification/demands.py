"""The single demands that verification makes; each objects with a clause that a user understands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from .allowances import learn_peer, learn_response, within
from .compare import bitwise_difference, distance, drift, form_difference
from .outcome import Outcome, Quantities, is_gradient
from .tolerances import DRIFT, DRIFT_UNITS, ENOUGH, LOUD, NATIVE_FACTOR, NOTHING, Tolerance
from .translation import Objection

__all__ = [
    "OVER_BUDGET", "TooFar", "Verdict", "check_attachment", "check_bits", "check_drift", "check_finite", "check_form",
    "check_memory", "check_not_finite", "check_same_quantities", "check_structure", "drifts", "gaps_and_jumps",
    "judged", "judged_within", "largest_gap", "overflowing_alike", "results_in",
]  # fmt: skip

OVER_BUDGET = "over the budget"
"""How the objection to an error begins that is larger than its budget."""

_LEARNED = object()
"""There is nothing more to learn."""


class TooFar(Objection):
    """Two values differ by more than their tolerance; more knowledge of rounding might allow it."""

    def __init__(self, message: str, error: float) -> None:
        super().__init__(message)
        self.error = error


@dataclass(frozen=True)
class Verdict:
    """What verification found."""

    ok: bool  # whether the rewrite keeps its promise
    reason: str  # a sentence that says what is wrong, or ""
    meaning_error: float = 0.0  # the largest difference between the exact runs, relative to the scale of what differs
    precision_error: float = 0.0  # the largest error of the rewritten module in its own types, likewise
    checked_in: str = "float64"  # or the narrower type that had to do
    # whether there are new tensors, computed in its own types: exact runs are no better than that
    is_rounded: bool = False
    jump: float = 0.0  # the largest error of gradients beyond the budget, as those of the original move, too


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


def check_memory(before: Outcome, after: Outcome) -> None:
    """Object to an output that shares memory as it did not: writing into it would change other tensors, or fail."""
    for output, owner in sorted(after.shared - before.shared):
        raise Objection(f"{output} shares memory with {owner}, so writing into it would change {owner} too")
    for name in sorted(after.expanded - before.expanded):
        raise Objection(f"{name} is expanded now, so writing into it would fail")


def check_finite(before: Quantities, after: Quantities) -> None:
    """Object to what is not finite any more."""
    for label, expected, found in _pairs_of_floats(before, after):
        lost = expected.isfinite() & ~found.isfinite()
        if lost.any():
            raise Objection(f"{label} is {found[lost][0].item()} where it was finite")


def check_not_finite(before: Quantities, after: Quantities) -> None:
    """Object to what is finite where it was not, and to a row that was all finite and is not."""
    for label, expected, found in _pairs_of_floats(before, after):
        old, new = ~expected.isfinite(), ~found.isfinite()
        if (old & ~new).any():
            raise Objection(f"{label} hides what is not finite: it is {found[old & ~new][0].item()} on an input of NaN")
        rows = (new.flatten(1).any(1) & ~old.flatten(1).any(1)) if expected.dim() > 1 else new & ~old
        if rows.any():
            raise Objection(f"{label} spreads what is not finite to row {int(rows.nonzero()[0])}")


def drifts(exact: Quantities, other: Quantities) -> dict[str, tuple[float, float]]:
    """Return by what part 16-bit floats are larger than the exact ones on the whole, and the noise left besides."""
    return {
        label: drift(expected, value)
        for label, expected, value in _pairs_of_floats(exact, other)
        if expected.numel() >= ENOUGH and value.dtype.itemsize == 2
    }


def check_drift(exact: Quantities, before: Quantities, after: Quantities, chance: Mapping[str, float]) -> None:
    """Object to an error of 16-bit floats that goes one way: rounding goes both, and so averages out. `chance` says
    by what part rounding was seen to move a quantity one way.
    """
    old = drifts(exact, before)
    for label, (now, noise) in drifts(exact, after).items():
        was, noise_before = old.get(label, (now, noise))
        if max(noise, noise_before) > LOUD:
            continue
        random = max(noise, noise_before) / math.sqrt(exact[label].numel())
        allowed = DRIFT * (max(abs(was), chance.get(label, 0.0)) + random)
        allowed += DRIFT_UNITS * torch.finfo(after[label].dtype).eps
        if abs(now) > allowed:
            raise Objection(f"{label} is off by {now:+.1%} on average, in its own types; it was by {was:+.1%}")


def _pairs_of_floats(before: Quantities, after: Quantities) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield what both runs have as floats of one shape."""
    for label, expected in before.items():
        found = after.get(label)
        if _is_floating(expected) and _is_floating(found) and expected.shape == found.shape:
            yield label, expected, found


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
        reason = form_difference(expected, after[label]) if expected is not None else ""
        if reason:
            raise Objection(f"{label} {reason}")


def results_in(values: Quantities) -> Quantities:
    """Return of all that a run yielded what its caller sees: the outputs, and the arguments that it changed."""
    return {label: value for label, value in values.items() if label.startswith(("output", "input"))}


def _error_around(expected: Quantities, found: Quantities, budget: float, peer: Mapping[str, float]) -> float:
    """Return the error of which gradients are the response: a few times that of the results, but no more than
    `budget`; 0 where the results are further off than they may be themselves.
    """
    wanted = results_in(expected)
    try:
        return min(NATIVE_FACTOR * largest_gap(wanted, found, within(wanted, budget, peer=peer), ""), budget)
    except TooFar:
        return 0.0


def check_bits(before: Quantities, after: Quantities) -> None:
    """Object to outputs, arguments or buffers that are not bitwise the same; gradients may be summed differently."""
    for label, expected in before.items():
        reason = "" if is_gradient(label) else bitwise_difference(expected, after[label])
        if reason:
            raise Objection(f"{label} {reason}")


def largest_gap(
    before: Quantities,
    after: Quantities,
    tolerances: Mapping[str, Tolerance],
    where: str,
    *,
    fewer_infinities: bool = False,
) -> float:
    """Return how far two runs are apart, relative to the scale of what differs most. Raises TooFar where any part
    of them is apart by more than its tolerance.
    """
    largest = 0.0
    for label, expected in before.items():
        found = after[label]
        if isinstance(expected, Tensor) and isinstance(found, Tensor) and expected.shape != found.shape:
            raise Objection(f"{label} {form_difference(expected, found)}")
        apart = distance(expected, found, tolerances.get(label, NOTHING), fewer_infinities=fewer_infinities)
        if apart.reason:
            stale = " is stale:" if label.startswith("buffer ") else ""
            raise TooFar(f"{label}{stale} {apart.reason} {where}", apart.error)
        largest = max(largest, apart.error)
    return largest


def gaps_and_jumps(before: Quantities, after: Quantities, tolerances: Mapping[str, Tolerance]) -> tuple[float, float]:
    """Return the largest error among the tensors that keep to their tolerance, and among those that do not."""
    compared = (distance(old, after[label], tolerances[label], fewer_infinities=True) for label, old in before.items())
    kept, beyond = [0.0], [0.0]
    for each in compared:
        (beyond if each.reason else kept).append(each.error)
    return max(kept), max(beyond)


def judged(judge: Callable[[], float], learn: Callable[[], Iterable[object]]) -> tuple[float, TooFar | None]:
    """Return the error, and the objection to it; where there is one, learn about rounding, and judge after each
    step. What is learned only widens tolerances: the first step that is enough gives the verdict of all.
    """
    steps = iter(learn())
    while True:
        try:
            return judge(), None
        except TooFar as objection:
            found = objection
        with suppress(Exception):  # the original need not take calls that are a little off: then nothing is learned
            if next(steps, _LEARNED) is not _LEARNED:
                continue
        return found.error, found


def judged_within(
    scales: Quantities, before: Quantities, found: Quantities, budget: float,
    respond: Callable[[float], Iterable[Quantities]], where: str, *, fewer_infinities: bool,
    peers: Callable[[], Iterable[Quantities]] = tuple,
) -> tuple[float, TooFar | None]:  # fmt: skip
    """Return what `judged` does, of errors within a budget relative to `scales`. Gradients may jump as the
    original's: `respond` runs that on inputs and state that are off by an error. All may err as `peers` besides.
    """
    responses, errors = dict[str, float](), dict[str, float]()

    def judge() -> float:
        allowed = within(scales, budget, responses, errors)
        return largest_gap(before, found, allowed, where, fewer_infinities=fewer_infinities)

    def learn() -> Iterator[None]:
        for run in peers():
            yield learn_peer(errors, before, run)
        error = _error_around(before, found, budget, errors)
        for run in respond(error) if error else ():
            yield learn_response(responses, scales, run)

    error, reason = judged(judge, learn)
    return error, None if reason is None else TooFar(f"{OVER_BUDGET} of {budget:g}: {reason}", reason.error)


def overflowing_alike(native: object, exact: Tensor) -> Tensor:
    """Return the exact values, except that what overflowed in the original may overflow again."""
    if not isinstance(native, Tensor) or native.shape != exact.shape:
        return exact
    if not exact.is_floating_point() or exact.layout is not torch.strided:
        return exact
    return torch.where(torch.isfinite(native), exact, native.to(exact.dtype))

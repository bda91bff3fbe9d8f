"""Compare what a module does in each use with what the original did."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ....errors import FxoptError
from ....runtime.values import flatten
from ..compare import Tolerance, deviation, scale_of
from ..demands import check_form, check_same_quantities, check_structure, largest_gap
from ..execution import Arguments, Outcome
from ..reference import Reference
from ..reference_runs import ReferenceRuns
from ..samples import Use, Used, run_in_use
from ..tolerances import Measured, Tolerances
from ..translation import Objection, Quantities, Translation, is_gradient, quantities

__all__ = ["check_no_new_draws", "check_uses"]

_DOUBLE = 1e-9
_SAFETY = 64.0
"""Converted to float64, a module may err by so much of the scale, and by so many times what the original does."""
_ROUNDING = 1e-12
"""What is left in float64 where numbers as large as the arguments cancel out, as in a norm of equal values."""

Alike = Callable[[Arguments, Quantities, Quantities, Tolerances, str], None]
"""Compares two runs in the module's own types, of which each may err."""


def check_no_new_draws(reference: Reference, runs: ReferenceRuns, before: Outcome, after: Outcome) -> None:
    """Object to random numbers that are drawn, or seeds that are set, where the original did neither."""
    if not reference.random and (runs.random or not before.random_state.equal(after.random_state)):
        raise Objection("random numbers are drawn, or their seed is set, where the original did neither")


def check_uses(
    reference: Reference, runs: ReferenceRuns, translation: Translation, tolerances: Tolerances, alike: Alike
) -> None:
    """Object to a use in which the rewritten module is another than the original; it may refuse to run."""
    for used in reference.used:
        if used.use is Use.STEPPED and not translation.covers:
            continue
        if used.use is not Use.STEPPED and runs.wide is not reference.wide:
            continue  # the rewritten code has no float64
        if used.use is Use.DOUBLE and translation.is_rounded:
            continue
        after = _run(used, runs, translation)
        if after is not None:
            _compare(used, after, translation, tolerances, alike)


def _run(used: Used, runs: ReferenceRuns, translation: Translation) -> Outcome | None:
    actual = translation.after.state
    try:
        return run_in_use(runs, used.use, used.calls, actual, translation.stand_ins(used.state))
    except FxoptError:  # refused, in a line of its own
        return None
    except Exception as error:
        raise Objection(f"the rewritten module raises {type(error).__name__}: {error} ({used.use.value})") from error


def _compare(used: Used, after: Outcome, translation: Translation, tolerances: Tolerances, alike: Alike) -> None:
    where, before = f"({used.use.value})", translation.quantities(used.run, used.state)
    found = quantities(after, after.parameter_gradients, after.buffers)
    check_structure(used.run, after)
    check_same_quantities(before, found)
    if used.use is not Use.DOUBLE or _are_narrower(before, found):
        check_form(before, found)
    if used.use is Use.STEPPED:
        alike(used.calls[1], before, found, tolerances, where)
    elif used.exact is None:
        allowed = tolerances.for_meaning(Measured(before, None), translation.reference.wide, is_derived=True)
        largest_gap(before, found, allowed, where)
    else:
        exact = translation.quantities(used.exact, used.state)
        exact = {label: value for label, value in exact.items() if label in before and not is_gradient(label)}
        largest_gap(exact, found, _doubled(exact, before, used.calls[0]), where, fewer_infinities=True)


def _are_narrower(before: Quantities, found: Quantities) -> bool:
    """Say whether a value is of a narrower type than it was, or of another kind."""
    pairs = (
        (old, found[label]) for label, old in before.items() if isinstance(old, Tensor) and old.is_floating_point()
    )
    return any(not isinstance(new, Tensor) or new.dtype.itemsize < old.dtype.itemsize for old, new in pairs)


def _doubled(exact: Quantities, before: Quantities, arguments: Arguments) -> Mapping[str, Tolerance]:
    """Return what a module that was converted to float64 may err by, of which the original's error is known."""
    given = [leaf for leaf in flatten(arguments).values() if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    rounding = _ROUNDING * max(map(scale_of, given), default=0.0)
    tensors = {label: value for label, value in exact.items() if isinstance(value, Tensor)}
    return {
        label: Tolerance(0.0, _DOUBLE * scale_of(value) + _SAFETY * deviation(value, before[label]) + rounding)
        if value.is_floating_point() or value.is_complex()
        else Tolerance(0.0, 0.0, places=int((value != before[label]).sum()))
        for label, value in tensors.items()
    }

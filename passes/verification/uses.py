"""What users do with a model besides calling it: run the original so, and compare what a rewritten module does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn

from ...errors import FxoptError
from ...runtime.values import Arguments, flatten
from .allowances import Allowances, Measured
from .compare import deviation, scale_of
from .demands import check_form, check_same_quantities, check_structure, largest_gap
from .inputs import perturbed_inputs, perturbed_state
from .outcome import Outcome, Quantities, differentiable, is_gradient
from .runs import Runs
from .samples import Reference, Use, Used
from .tolerances import DOUBLE, ROUNDING, SAFETY, Tolerance
from .translation import Objection, Translation

__all__ = ["check_uses", "taken_uses"]


def taken_uses(runs: Runs, arguments: Arguments, state: Mapping[str, Tensor]) -> Iterator[Used]:
    """Yield the uses that a module takes, with its runs."""
    given, parameters = runs.conditions, runs.harness.parameters
    calls = arguments, perturbed_inputs(arguments, given.seed + 3)
    is_trained = given.gradients and given.of_inputs and given.wide is not None and parameters
    sensible = {Use.DOUBLE: given.wide is torch.float64, Use.FROZEN: is_trained, Use.STEPPED: parameters}
    moved = perturbed_state(state, given.seed)  # as after a step of an optimizer; buffers stay
    stepped = {name: moved[name] if isinstance(tensor, nn.Parameter) else tensor for name, tensor in state.items()}
    for use in (use for use, tells in sensible.items() if tells):
        after = stepped if use is Use.STEPPED else state
        with suppress(Exception):  # the module's code need not take it
            run = _run(runs, use, calls, state, after)
            exact = runs.exact(arguments, state) if use is Use.DOUBLE else None
            if run.is_finite():
                yield Used(use, calls, after, run, exact)


def _run(
    runs: Runs, use: Use, calls: tuple[Arguments, Arguments], state: Mapping[str, Tensor], stepped: Mapping[str, Tensor]
) -> Outcome:
    if use is Use.DOUBLE:
        return runs.doubled(calls[0], state)
    if use is Use.FROZEN:
        return runs.exact(calls[0], state, frozen=True)
    return runs.stepped(calls, state, stepped)


def check_uses(
    reference: Reference, runs: Runs, translation: Translation, allowances: Allowances,
    alike: Callable[[Arguments, Quantities, Quantities, str], None],
) -> None:  # fmt: skip
    """Object to a use in which the rewritten module is another than the original; it may refuse to run. `alike`
    compares two runs in the module's own types, of which each may err.
    """
    has_other_types = runs.wide is not reference.conditions.wide  # the rewritten code has no float64
    for used in reference.used:
        is_known = translation.covers if used.use is Use.STEPPED else not has_other_types
        if not is_known or (used.use is Use.DOUBLE and translation.is_rounded):
            continue
        where, calls = f"({used.use.value})", used.calls
        try:
            after = _run(runs, used.use, calls, translation.after.state, translation.stand_ins(used.state))
        except FxoptError:  # refused, in a line of its own
            continue
        except Exception as error:
            raise Objection(f"the rewritten module raises {type(error).__name__}: {error} {where}") from error
        before, found = translation.quantities(used.run, used.state), after.quantities()
        check_structure(used.run, after)
        check_same_quantities(before, found)
        if used.use is not Use.DOUBLE or _are_narrower(before, found):
            check_form(before, found)
        if used.use is Use.STEPPED:
            alike(calls[1], before, found, where)
        elif used.exact is None:
            allowed = allowances.for_meaning(Measured(before, None), reference.conditions.wide, is_derived=True)
            largest_gap(before, found, allowed, where)
        else:
            exact = translation.quantities(used.exact, used.state)
            exact = {label: value for label, value in exact.items() if label in before and not is_gradient(label)}
            largest_gap(exact, found, _doubled(exact, before, calls[0]), where, fewer_infinities=True)


def _are_narrower(before: Quantities, found: Quantities) -> bool:
    """Say whether a value is of a narrower type than it was, or of another kind."""
    floats = {label: old for label, old in before.items() if isinstance(old, Tensor) and old.is_floating_point()}
    pairs = ((old, found[label]) for label, old in floats.items())
    return any(not isinstance(new, Tensor) or new.dtype.itemsize < old.dtype.itemsize for old, new in pairs)


def _doubled(exact: Quantities, before: Quantities, arguments: Arguments) -> Mapping[str, Tolerance]:
    """Return what a module that was converted to float64 may err by, of which the original's error is known."""
    given = [leaf for leaf in flatten(arguments).values() if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    rounding = ROUNDING * max(map(scale_of, given), default=0.0)
    tensors = {label: value for label, value in exact.items() if isinstance(value, Tensor)}
    return {
        label: Tolerance(0.0, DOUBLE * scale_of(value) + SAFETY * deviation(value, before[label]) + rounding)
        if differentiable(value)
        else Tolerance(0.0, 0.0, places=int((value != before[label]).sum()))
        for label, value in tensors.items()
    }

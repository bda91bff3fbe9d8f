"""Decide whether a rewritten module still is what it was: outputs, gradients, buffers, types, and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from ...errors import GuardError
from ..sites import Numerics
from .compare import Tolerance
from .demands import (
    TooFar,
    Verdict,
    check_attachment,
    check_bits,
    check_drift,
    check_expansion,
    check_finite,
    check_form,
    check_not_finite,
    check_same_quantities,
    check_sharing,
    check_structure,
    drifts,
    error_around,
    gaps_and_jumps,
    judged,
    largest_gap,
    overflowing_alike,
    results_in,
)
from .execution import Arguments, Outcome
from .inputs import Asked, ServedCall
from .judging import NotAskedError, check_no_new_draws, check_uses, lenient
from .module_harness import ModuleHarness
from .reference import Reference, reference
from .samples import Data, Sample
from .tolerances import Measured, Tolerances, within
from .translation import MapState, Objection, Quantities, Translation, is_gradient, quantities

__all__ = ["NO_ELEMENTS", "MapState", "Reference", "Verdict", "reference", "verify"]

NO_ELEMENTS = "nothing: every result is empty"
"""What a verdict is checked in where no call of the examples has a number to compare."""

T = TypeVar("T")

_ECHOES = 4
_PROBES = 8
"""How often a module that seems to be wrong is run again, to learn what rounding does to it."""

_UNITS = 4.0
"""How many units in the last place inputs and state are off then."""

_MORE_UNITS = 32.0
"""The same where only gradients are off: of few ReLUs that fall on the other side, none may have done so before."""


def verify(
    reference: Reference,
    module: nn.Module,
    *,
    map_state: MapState = dict,
    numerics: Numerics = Numerics.REASSOCIATED,
    budget: float = 0.05,
    keeps_form: bool = True,
    least: Mapping[str, Tolerance] | None = None,
) -> Verdict:
    """Compare a rewritten module with the `reference` that was taken before.

    Two questions are asked. *Meaning*: in float64, on the recorded inputs, and with noise on inputs, parameters and
    buffers (mapped to their new places), both agree to 1e-10. *Precision*: in its own types, the rewritten module errs
    at most 4 times as much as the original did, plus 8 units in the last place of the output's scale.

    Args:
        reference: of the module before.
        module: the module now; it is left exactly as it is.
        map_state: from all old parameters and buffers by name to the new ones.
        numerics: what the rewrite promises. `EXACT` outputs and buffers must be bitwise the same, and so must the
            random stream; `APPROXIMATE` answers to `budget` alone; `SEMANTIC` need only run. Of both the state makes
            the round trip, and results keep their form.
        budget: the error that `APPROXIMATE` allows, relative to the scale of each tensor; see `within`.
        keeps_form: whether the results of `SEMANTIC` keep their shapes and types.
        least: by label, what the rewritten module may err by in its own types, whatever the original does.
    """
    check = _Check(reference, ModuleHarness(module), map_state, numerics, budget, keeps_form, least)
    try:
        check.run()
    except Objection as objection:
        return check.verdict(str(objection))
    return check.verdict("")


def _has_elements(sample: Sample) -> bool:
    outputs: list[object] = list(sample.exact.outputs.values())
    return not outputs or any(not isinstance(value, Tensor) or value.numel() for value in outputs)


class _Check:
    """One verification under way."""

    def __init__(
        self,
        reference: Reference,
        after: ModuleHarness,
        map_state: MapState,
        numerics: Numerics,
        budget: float,
        keeps_form: bool,
        least: Mapping[str, Tolerance] | None,
    ) -> None:
        self.least = least
        self.reference, self.after, self.numerics, self.budget = reference, after, numerics, budget
        self.map_state, self.keeps_form = map_state, keeps_form
        self.keeps_meaning = numerics in (Numerics.EXACT, Numerics.REASSOCIATED)
        self.runs = reference.runs_of(after)
        self.meaning_error = self.precision_error = self.jump = 0.0
        self.is_rounded = False

    def verdict(self, reason: str) -> Verdict:
        errors = self.meaning_error, self.precision_error
        return Verdict(not reason, reason, *errors, self.checked_in, self.is_rounded, self.jump)

    @property
    def checked_in(self) -> str:
        if not self.reference.samples:
            return "nothing: there was no call to run"
        if not any(map(_has_elements, self.reference.samples)):
            return NO_ELEMENTS
        wide = self.runs.wide
        return "its own types" if wide is None else str(wide).removeprefix("torch.")

    def run(self) -> None:
        if not self.reference.samples:
            return
        translation = Translation(self.reference, self.after, self.map_state)
        self.is_rounded = translation.is_rounded
        self._state(translation)
        if self.numerics is Numerics.SEMANTIC:
            self._only_runs(translation)
            return
        wanted = self._wanted(translation)
        samples = [sample for sample in self.reference.samples if sample.data in wanted]
        measured = [_measured(sample, translation) for sample in samples]
        tolerances = Tolerances(self.reference, measured, is_rounded=self.is_rounded, least=self.least)
        for sample, before in zip(samples, measured, strict=True):
            with lenient(sample):
                self._sample(sample, before, translation, tolerances)
        if self.keeps_meaning and self.reference.serving:
            with suppress(GuardError):
                self._served(samples[0], translation, tolerances)
        if self.keeps_meaning:
            alike = partial(self._alike, samples[0])
            check_uses(self.reference, self.runs, translation, tolerances, alike)
        if self.numerics is Numerics.EXACT and self.reference.stream is not None:
            self._stream(samples[0], self.reference.stream, translation)

    def _state(self, translation: Translation) -> None:
        if self.keeps_meaning:
            translation.check_state()
            translation.check_way_back()
        elif translation.steps is not None:
            translation.check_state()
            translation.check_round_trip()

    def _wanted(self, translation: Translation) -> tuple[Data, ...]:
        if not self.keeps_meaning:
            return (Data.RECORDED,)
        return tuple(data for data in Data if translation.covers or data is not Data.NOISY)

    def _only_runs(self, translation: Translation) -> None:
        for sample in self.reference.samples:
            if sample.native is None or sample.data is not Data.RECORDED:
                continue
            after = self._attempt("native", sample, self.after.state)
            check_structure(sample.native, after)
            if self.keeps_form:
                before = translation.quantities(sample.native, sample.state)
                check_form(results_in(before), results_in(_quantities(after)))

    def _sample(self, sample: Sample, before: Measured, translation: Translation, tolerances: Tolerances) -> None:
        state = translation.stand_ins(sample.state) if sample.data is Data.NOISY else self.after.state
        exact = self._exact(sample, state) if self.keeps_meaning else None
        if exact is not None:
            self._meaning(sample, before, exact, tolerances, state)
        if before.native is not None:
            self._precision(sample, before, exact, tolerances, state)

    def _exact(self, sample: Sample, state: Mapping[str, Tensor]) -> Outcome:
        """Run exactly, where only the rewritten code lacks float64 in a narrower type."""
        if sample.data is Data.SECOND:
            return self._second(sample, state)
        while self.runs.wide is not None:
            try:
                return self.runs.exact(sample.arguments, state)
            except GuardError:
                raise
            except Exception:  # if it is not for want of a kernel, it comes again below, and becomes the objection
                self.runs.wide = torch.float32 if self.runs.wide is torch.float64 else None
                self.runs.census = None
        return self._attempt("native", sample, state)

    def _second(self, sample: Sample, state: Mapping[str, Tensor]) -> Outcome:
        """Return second derivatives; kernels of torch that have none are not held against a rewrite."""
        if self.runs.wide is not self.reference.wide:
            raise NotAskedError
        try:
            return self.runs.exact(sample.arguments, state, second=True)
        except GuardError:
            raise
        except Exception as error:
            if "derivative for aten::" in str(error):
                raise NotAskedError from error
            raise Objection(f"second derivatives raise {type(error).__name__}: {error}") from error

    def _attempt(self, kind: str, sample: Sample, state: Mapping[str, Tensor]) -> Outcome:
        return self._tried(lambda: getattr(self.runs, kind)(sample.arguments, state), sample.data.value)

    def _tried(self, run: Callable[[], T], where: str) -> T:  # unlike sizes may never come: an error is nothing wrong
        try:
            return run()
        except GuardError:
            raise
        except Exception as error:
            raised = Objection(f"the rewritten module raises {type(error).__name__}: {error} ({where})")
            raise (NotAskedError() if where == Data.UNEVEN.value else raised) from error

    def _meaning(
        self, sample: Sample, before: Measured, exact: Outcome, tolerances: Tolerances, state: Mapping[str, Tensor]
    ) -> None:
        check_structure(sample.exact, exact)
        check_attachment(sample.exact, exact)
        found = _quantities(exact)
        check_same_quantities(before.exact, found)
        compared = before.exact
        if sample.data.is_at_bends:  # gradients there are a matter of taste, but those that are finite stay so
            check_finite(compared, found)
            compared = {label: value for label, value in compared.items() if not is_gradient(label)}

        def judge() -> float:
            allowed = tolerances.for_meaning(before, self.runs.wide, is_derived=sample.data.is_derived)
            return largest_gap(compared, found, allowed, f"({self.checked_in}, {sample.data.value})")

        def learn() -> Iterator[None]:
            for run in self._jittered(sample, state, tolerances.wide_epsilon, _ECHOES):
                yield tolerances.learn_exact(found, _quantities(run))

        error, objection = judged(judge, learn)
        if objection is not None or not sample.data.is_derived:  # far from the examples, much is rounding of nothing
            self.meaning_error = max(self.meaning_error, error)
        if objection is not None:
            raise objection

    def _precision(
        self,
        sample: Sample,
        before: Measured,
        exact: Outcome | None,
        tolerances: Tolerances,
        state: Mapping[str, Tensor],
    ) -> None:
        native, found = before.native or {}, _quantities(self._native(sample, state))
        check_same_quantities(before.exact, found)
        check_form(native if self.keeps_meaning else results_in(native), found)
        if self.numerics is Numerics.EXACT and not self.reference.random:
            check_bits(native, found)
        tensors = {label: value for label, value in before.exact.items() if isinstance(value, Tensor)}
        expected = {label: overflowing_alike(native[label], value) for label, value in tensors.items()}
        budget = None if self.keeps_meaning else self.budget

        def judge() -> float:
            allowed = tolerances.for_precision(before, budget)
            where = f"(in its own types, {sample.data.value})"
            return largest_gap(expected, found, allowed, where, fewer_infinities=True)

        def learn() -> Iterator[None]:
            if exact is None:
                error = error_around(expected, found, self.budget)
                yield from self._learn_response(sample, before, error, tolerances)
                return
            for run in self._rounded(sample, state, _UNITS):
                yield tolerances.learn_native(_quantities(exact), run)
            results = {label: value for label, value in expected.items() if not is_gradient(label)}
            with suppress(TooFar):
                largest_gap(results, found, tolerances.for_precision(before), "", fewer_infinities=True)
                for run in self._rounded(sample, state, _MORE_UNITS):
                    yield tolerances.learn_jumps(_quantities(exact), run)

        error, objection = judged(judge, learn)
        if budget is not None and objection is None:
            error, jump = gaps_and_jumps(expected, found, within(before.exact, budget))
            self.jump = max(self.jump, jump)
        self.precision_error = max(self.precision_error, error)
        if objection is not None:
            raise objection
        if self.keeps_meaning and exact is not None:
            self._drift(sample, expected, native, found, state)

    def _learn_response(self, sample: Sample, before: Measured, error: float, tolerances: Tolerances) -> Iterator[None]:
        """Note how far gradients of the original move under an error of inputs and state, run by run."""
        runs, translation = self.reference.original, Translation(self.reference, self.after, self.map_state)
        if runs is None or not error:
            return
        for run in runs.around(sample.arguments, sample.state, error, _PROBES):
            yield tolerances.learn_response(before.exact, translation.quantities(run, sample.state))

    def _drift(
        self, sample: Sample, expected: Quantities, native: Quantities, found: Quantities, state: Mapping[str, Tensor]
    ) -> None:
        """Object to errors that go one way; where there are, learn first what one rounding does."""
        with suppress(Objection):
            return check_drift(expected, native, found, {})
        seen: dict[str, float] = {}
        for run in self._jittered(sample, state, self.reference.native_epsilon, _ECHOES):
            for label, (share, _) in drifts(expected, _quantities(run)).items():
                seen[label] = max(seen.get(label, 0.0), abs(share))
        return check_drift(expected, native, found, seen)

    def _native(self, sample: Sample, state: Mapping[str, Tensor]) -> Outcome:
        native = self._attempt("native", sample, state)
        check_structure(sample.exact, native)
        if self.keeps_meaning and sample.native is not None:
            check_sharing(sample.native, native)
            check_expansion(sample.native, native)
            check_no_new_draws(self.reference, self.runs, sample.native, native)
        return native

    def _served(self, first: Sample, translation: Translation, tolerances: Tolerances) -> None:
        """Compare calls made in a row without gradients."""
        calls, where = self.reference.served, "without gradients"
        after = self._tried(lambda: self.runs.served([one.arguments for one in calls], self.after.state), where)
        for number, (old, new) in enumerate(zip(self.reference.serving, after, strict=True)):
            check_structure(old, new)
            before, found = translation.quantities(old, self.reference.state), _quantities(new)
            check_same_quantities(before, found)
            check_form(before, found)
            near = tolerances
            if (exact := calls[number].exact) is not None:
                near = tolerances.with_native(translation.quantities(exact, self.reference.state), before)
            self._as_asked(calls[number], first, before, found, near, f"({where}, call {number + 1})")

    def _as_asked(
        self, call: ServedCall, first: Sample, before: Quantities, found: Quantities, tolerances: Tolerances, where: str
    ) -> None:
        if call.asked is Asked.FINITE:
            check_finite(before, found)
        elif call.asked is Asked.NOT_FINITE:
            check_not_finite(before, found)
        elif call.asked is Asked.BITS and self.numerics is Numerics.EXACT and not self.reference.random:
            check_bits(before, found)
        else:
            of_inputs = call.asked is not Asked.EXACTLY
            self._alike(first, call.arguments, before, found, tolerances, where, of_inputs=of_inputs)

    def _alike(
        self, first: Sample, arguments: Arguments, before: Quantities, found: Quantities, tolerances: Tolerances,
        where: str, *, of_inputs: bool = True,
    ) -> None:  # fmt: skip
        """Compare two runs in the module's own types; each may err, as rounding of the state or all moves them."""
        sample = replace(first, arguments=arguments)

        def judge() -> float:
            allowed = tolerances.for_precision(Measured(before, before))
            twice = {label: replace(one, absolute=2 * one.absolute) for label, one in allowed.items()}
            return largest_gap(before, found, twice, where, fewer_infinities=True)

        def learn() -> Iterator[None]:
            exact = _quantities(self._exact(sample, self.after.state))
            step = _UNITS * self.reference.native_epsilon
            for run in self._jittered(sample, self.after.state, step, _PROBES, of_inputs=of_inputs):
                yield tolerances.learn_native(exact, _quantities(run))

        objection = judged(judge, learn)[1]
        if objection is not None:
            raise objection

    def _jittered(
        self, sample: Sample, state: Mapping[str, Tensor], step: float, count: int, *, of_inputs: bool = True
    ) -> Iterator[Outcome]:
        """Run the rewritten module on inputs and state, or state alone, that are off by `step`."""
        is_second = sample.data is Data.SECOND
        return self.runs.around(sample.arguments, state, step, count, second=is_second, of_inputs=of_inputs)

    def _rounded(self, sample: Sample, state: Mapping[str, Tensor], units: float) -> Iterator[Quantities]:
        """Yield what a few units of rounding make: in its own types where the original can run, else exactly."""
        step, runs = units * self.reference.native_epsilon, self.reference.original
        if runs is None:
            return map(_quantities, self._jittered(sample, state, step, _PROBES))
        translation = Translation(self.reference, self.after, self.map_state)
        near = runs.around(sample.arguments, sample.state, step, _PROBES, native=True)
        return (translation.quantities(run, sample.state) for run in near)

    def _stream(self, sample: Sample, before: Outcome, translation: Translation) -> None:
        """Compare runs on the plain random stream, and how far each has advanced it."""
        after = self._attempt("stream", sample, self.after.state)
        check_bits(translation.quantities(before, self.reference.state), _quantities(after))
        if not torch.equal(before.random_state, after.random_state):
            raise Objection("the random stream does not advance as before")


def _measured(sample: Sample, translation: Translation) -> Measured:
    native = None if sample.native is None else translation.quantities(sample.native, sample.state)
    return Measured(translation.quantities(sample.exact, sample.state), native)


def _quantities(run: Outcome) -> Quantities:
    return quantities(run, run.parameter_gradients, run.buffers)

"""Decide whether a rewritten module still is what it was: outputs, gradients, buffers, types, and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from ...errors import GuardError
from ...layers.delegated import as_converted
from ...runtime.values import Arguments
from ..sites import Numerics
from .allowances import Allowances, Measured, within
from .demands import (
    TooFar,
    Verdict,
    check_attachment,
    check_bits,
    check_drift,
    check_finite,
    check_form,
    check_memory,
    check_not_finite,
    check_same_quantities,
    check_structure,
    drifts,
    gaps_and_jumps,
    judged,
    judged_within,
    largest_gap,
    overflowing_alike,
    results_in,
)
from .inputs import Asked, ServedCall
from .module_harness import ModuleHarness
from .outcome import Outcome, Quantities, is_gradient
from .runs import Runs
from .samples import Data, Peer, Reference, Sample, no_peer
from .tolerances import ECHOES, JUMP_UNITS, PROBES, UNITS, Tolerance
from .translation import MapState, Objection, Translation
from .uses import check_uses

__all__ = ["NO_ELEMENTS", "verify"]

NO_ELEMENTS = "nothing: every result is empty"
"""What a verdict is checked in where no call of the examples has a number to compare."""

T = TypeVar("T")


class _NotAskedError(Exception):
    """A sample says nothing of a rewrite."""


@as_converted()
def verify(
    reference: Reference,
    module: nn.Module,
    *,
    map_state: MapState = dict,
    numerics: Numerics = Numerics.REASSOCIATED,
    budget: float = 0.05,
    keeps_form: bool = True,
    least: Mapping[str, Tolerance] | None = None,
    peer: Peer = no_peer,
) -> Verdict:
    """Compare a rewritten module with the `reference` that was taken before; see `tolerances` for how near is near.

    *Meaning*: in float64, on the recorded inputs, on calls derived from them and with noise on inputs and state, both
    agree to 1e-10. *Precision*: in its own types the rewritten module errs 4 times as much as the original at most.

    Args:
        module: as it is now, and is left.
        map_state: from all old parameters and buffers by name to the new ones.
        numerics: what the rewrite promises. `EXACT` outputs and buffers must be bitwise the same, and so must the
            random stream; `APPROXIMATE` answers to `budget` alone; `SEMANTIC` need only run. Of both the state makes
            the round trip, and results keep their form.
        budget: the error that `APPROXIMATE` allows, relative to the scale of each tensor; see `within`.
        keeps_form: whether the results of `SEMANTIC` keep their shapes and types.
        least: by label, what the rewritten module may err by in its own types, whatever the original does.
        peer: opens what the original may run under in training whose error is allowed, beside the budget.
    """
    check = _Check(reference, ModuleHarness(module), map_state, numerics, budget, keeps_form, least, peer)
    try:
        check.run()
    except Objection as objection:
        return check.verdict(str(objection))
    return check.verdict("")


def _has_elements(sample: Sample) -> bool:
    outputs: list[object] = list(sample.exact.outputs.values())
    return not outputs or any(not isinstance(value, Tensor) or value.numel() for value in outputs)


@dataclass(frozen=True)
class _Case:
    """One sample, what it is under the new names, and the state that the rewritten module runs it on."""

    sample: Sample
    before: Measured
    state: Mapping[str, Tensor]

    @property
    def where(self) -> str:
        return self.sample.data.value


@dataclass
class _Check:
    """One verification under way."""

    reference: Reference
    after: ModuleHarness
    map_state: MapState
    numerics: Numerics
    budget: float
    keeps_form: bool
    least: Mapping[str, Tolerance] | None
    peer: Peer
    meaning_error: float = 0.0
    precision_error: float = 0.0
    jump: float = 0.0
    is_rounded: bool = False

    def __post_init__(self) -> None:
        self.keeps_meaning = self.numerics in (Numerics.EXACT, Numerics.REASSOCIATED)
        self.runs = Runs(self.after, self.reference.conditions)

    def verdict(self, reason: str) -> Verdict:
        errors = self.meaning_error, self.precision_error
        return Verdict(not reason, reason, *errors, self.checked_in, self.is_rounded, self.jump)

    @property
    def checked_in(self) -> str:
        if not self.reference.samples:
            return "nothing: there was no call to run"
        if not any(map(_has_elements, self.reference.samples)):
            return NO_ELEMENTS
        return "its own types" if self.runs.wide is None else str(self.runs.wide).removeprefix("torch.")

    def run(self) -> None:
        if not self.reference.samples:
            return
        self.translation = Translation(self.reference, self.after, self.map_state)
        self.is_rounded = self.translation.is_rounded
        self._state()
        if self.numerics is Numerics.SEMANTIC:
            self._only_runs()
        else:
            self._compare_all()

    def _compare_all(self) -> None:
        reference = self.reference
        cases = [self._case(sample) for sample in reference.samples if self._is_wanted(sample.data)]
        self.allowances = Allowances(
            reference.native_epsilon, reference.conditions.wide, [case.before for case in cases],
            is_rounded=self.is_rounded, least=self.least,
        )  # fmt: skip
        for case in cases:
            self._compare(case)
        if self.keeps_meaning:
            self._serve()
            check_uses(reference, self.runs, self.translation, self.allowances, self._alike)
        if self.numerics is Numerics.EXACT and reference.stream is not None:
            self._stream(reference.samples[0].arguments, reference.stream)

    def _state(self) -> None:
        if self.keeps_meaning:
            self.translation.check_state()
            self.translation.check_way_back()
        elif self.translation.steps is not None:
            self.translation.check_state()
            self.translation.check_round_trip()

    def _is_wanted(self, data: Data) -> bool:
        if not self.keeps_meaning:
            return data is Data.RECORDED
        return self.translation.covers or data is not Data.NOISY

    def _case(self, sample: Sample) -> _Case:
        exact = self.translation.quantities(sample.exact, sample.state)
        native = None if sample.native is None else self.translation.quantities(sample.native, sample.state)
        state = self.translation.stand_ins(sample.state) if sample.data is Data.NOISY else self.after.state
        return _Case(sample, Measured(exact, native), state)

    def _only_runs(self) -> None:
        for sample in self.reference.samples:
            if sample.native is None or sample.data is not Data.RECORDED:
                continue
            after = self._native_of(sample.arguments, self.after.state, sample.data)
            check_structure(sample.native, after)
            if self.keeps_form:
                before = self.translation.quantities(sample.native, sample.state)
                check_form(results_in(before), results_in(after.quantities()))

    def _compare(self, case: _Case) -> None:
        """Compare on one sample; a call that verification thought of may be refused where no graph fits."""
        try:
            if self.keeps_meaning:
                self._meaning(case)
            if case.before.native is not None:
                self._precision(case, case.before.native)
        except _NotAskedError:
            pass
        except GuardError as refusal:
            if not case.sample.data.is_derived:
                raise Objection(f"the rewritten module raises GuardError: {refusal}") from refusal

    def _exact(self, arguments: Arguments, state: Mapping[str, Tensor], data: Data = Data.RECORDED) -> Outcome:
        """Run exactly, where only the rewritten code lacks float64 in a narrower type."""
        if data is Data.SECOND:
            return self._second(arguments, state)
        while self.runs.wide is not None:
            try:
                return self.runs.exact(arguments, state)
            except GuardError:
                raise
            except Exception:  # if it is not for want of a kernel, it comes again below, and becomes the objection
                self.runs.set(wide=torch.float32 if self.runs.wide is torch.float64 else None)
        return self._native_of(arguments, state, data)

    def _second(self, arguments: Arguments, state: Mapping[str, Tensor]) -> Outcome:
        """Return second derivatives; kernels of torch that have none are not held against a rewrite."""
        if self.runs.wide is not self.reference.conditions.wide:
            raise _NotAskedError
        try:
            return self.runs.exact(arguments, state, second=True)
        except GuardError:
            raise
        except Exception as error:
            if "derivative for aten::" in str(error):
                raise _NotAskedError from error
            raise Objection(f"second derivatives raise {type(error).__name__}: {error}") from error

    def _native_of(self, arguments: Arguments, state: Mapping[str, Tensor], data: Data) -> Outcome:
        return self._tried(lambda: self.runs.native(arguments, state), data.value)

    def _tried(self, run: Callable[[], T], where: str) -> T:  # unlike sizes may never come: an error is nothing wrong
        try:
            return run()
        except GuardError:
            raise
        except Exception as error:
            raised = Objection(f"the rewritten module raises {type(error).__name__}: {error} ({where})")
            raise (_NotAskedError() if where == Data.UNEVEN.value else raised) from error

    def _meaning(self, case: _Case) -> None:
        """Compare exact runs."""
        sample, before = case.sample, case.before
        exact = self._exact(sample.arguments, case.state, sample.data)
        check_structure(sample.exact, exact)
        check_attachment(sample.exact, exact)
        found, compared = exact.quantities(), before.exact
        check_same_quantities(before.exact, found)
        if sample.data.is_at_bends:  # gradients there are a matter of taste, but those that are finite stay so
            check_finite(compared, found)
            compared = {label: value for label, value in compared.items() if not is_gradient(label)}

        def judge() -> float:
            allowed = self.allowances.for_meaning(before, self.runs.wide, is_derived=sample.data.is_derived)
            return largest_gap(compared, found, allowed, f"({self.checked_in}, {case.where})")

        def learn() -> Iterator[None]:
            for run in self._around(sample, self.allowances.wide_epsilon, ECHOES):
                yield self.allowances.learn_exact(before.exact, run)

        error, reason = judged(judge, learn)
        if reason is not None or not sample.data.is_derived:  # far from the examples, much is rounding of nothing
            self.meaning_error = max(self.meaning_error, error)
        if reason is not None:
            raise reason

    def _precision(self, case: _Case, native: Quantities) -> None:
        run = self._native_of(case.sample.arguments, case.state, case.sample.data)
        found, before = run.quantities(), case.before.exact
        check_structure(case.sample.exact, run)
        if self.keeps_meaning and case.sample.native is not None:
            check_memory(case.sample.native, run)
            self._check_no_new_draws(case.sample.native, run)
        check_same_quantities(before, found)
        check_form(native if self.keeps_meaning else results_in(native), found)
        if self.numerics is Numerics.EXACT and not self.reference.conditions.random:
            check_bits(native, found)
        tensors = {label: value for label, value in before.items() if isinstance(value, Tensor)}
        expected = {label: overflowing_alike(native[label], value) for label, value in tensors.items()}
        where = f"(in its own types, {case.where})"
        judge = self._as_precise if self.keeps_meaning else self._within_budget
        error, reason = judge(case, expected, found, where)
        self.precision_error = max(self.precision_error, error)
        if reason is not None:
            raise reason
        if self.keeps_meaning:
            self._drift(case, expected, native, found)

    def _check_no_new_draws(self, before: Outcome, after: Outcome) -> None:
        """Object to random numbers that are drawn, or seeds that are set, where the original did neither."""
        is_new = self.runs.conditions.random or not before.random_state.equal(after.random_state)
        if is_new and not self.reference.conditions.random:
            raise Objection("random numbers are drawn, or their seed is set, where the original did neither")

    def _as_precise(
        self, case: _Case, expected: Quantities, found: Quantities, where: str
    ) -> tuple[float, TooFar | None]:
        """Return how far a run is from the exact one of the original, which rounding may move as was seen."""
        allowances, exact = self.allowances, case.before.exact

        def rounded(units: float) -> Iterator[Quantities]:
            return self._around(case.sample, units * self.reference.native_epsilon, PROBES, native=True)

        def judge() -> float:
            return largest_gap(expected, found, allowances.for_precision(case.before), where, fewer_infinities=True)

        def learn() -> Iterator[None]:
            for run in rounded(UNITS):
                yield allowances.learn_native(exact, run)
            results = {label: value for label, value in expected.items() if not is_gradient(label)}
            with suppress(TooFar):
                largest_gap(results, found, allowances.for_precision(case.before), "", fewer_infinities=True)
                for run in rounded(JUMP_UNITS):
                    yield allowances.learn_jumps(exact, run)

        return judged(judge, learn)

    def _within_budget(
        self, case: _Case, expected: Quantities, found: Quantities, where: str
    ) -> tuple[float, TooFar | None]:
        before, sample = case.before.exact, case.sample

        def respond(error: float) -> Iterator[Quantities]:
            return self._around(sample, error, PROBES)

        def peers() -> Iterator[Quantities]:
            context = self.peer() if self.reference.conditions.gradients else None
            if context is not None:
                with context:
                    run = self.reference.original.native(sample.arguments, sample.state)
                yield self.translation.quantities(run, sample.state)

        error, reason = judged_within(
            before, expected, found, self.budget, respond, where, fewer_infinities=True, peers=peers
        )
        if reason is None:
            error, jump = gaps_and_jumps(expected, found, within(before, self.budget))
            self.jump = max(self.jump, jump)
        return error, reason

    def _drift(self, case: _Case, expected: Quantities, native: Quantities, found: Quantities) -> None:
        """Object to errors that go one way; where there are, learn first what one rounding does."""
        with suppress(Objection):
            return check_drift(expected, native, found, {})
        seen: dict[str, float] = {}
        for run in self._around(case.sample, self.reference.native_epsilon, ECHOES, native=True):
            for label, (share, _) in drifts(expected, run).items():
                seen[label] = max(seen.get(label, 0.0), abs(share))
        return check_drift(expected, native, found, seen)

    def _around(self, sample: Sample, step: float, count: int, *, native: bool = False) -> Iterator[Quantities]:
        """Run the original on inputs and state that are off by `step`: a rewrite does not say what rounding is."""
        near = self.reference.original.around(
            sample.arguments, sample.state, step, count, native=native, second=sample.data is Data.SECOND
        )
        return (self.translation.quantities(run, sample.state) for run in near)

    def _serve(self) -> None:
        """Compare calls made in a row without gradients, unless no graph is for one of them."""
        served, where = self.reference.served, "without gradients"
        if not served:
            return
        with suppress(GuardError):
            calls = [call.arguments for call, _ in served]
            after = self._tried(lambda: self.runs.served(calls, self.after.state), where)
            for number, ((call, old), new) in enumerate(zip(served, after, strict=True)):
                self._served(call, old, new, f"({where}, call {number + 1})")

    def _served(self, call: ServedCall, old: Outcome, new: Outcome, where: str) -> None:
        check_structure(old, new)
        state, allowances = self.reference.state, self.allowances
        before, found = self.translation.quantities(old, state), new.quantities()
        check_same_quantities(before, found)
        check_form(before, found)
        if call.asked is Asked.FINITE:
            check_finite(before, found)
        elif call.asked is Asked.NOT_FINITE:
            check_not_finite(before, found)
        elif call.asked is Asked.BITS and self.numerics is Numerics.EXACT and not self.reference.conditions.random:
            check_bits(before, found)
        else:
            if call.exact is not None:
                allowances = allowances.with_native(self.translation.quantities(call.exact, state), before)
            of_inputs = call.asked is not Asked.EXACTLY
            self._alike(call.arguments, before, found, where, allowances, of_inputs=of_inputs)

    def _alike(
        self, arguments: Arguments, before: Quantities, found: Quantities, where: str,
        allowances: Allowances | None = None, *, of_inputs: bool = True,
    ) -> None:  # fmt: skip
        """Compare two runs in the module's own types; each may err, as rounding of the state or all moves them."""
        known, state, original = allowances or self.allowances, self.reference.state, self.reference.original

        def quantities(run: Outcome) -> Quantities:
            return self.translation.quantities(run, state)

        def judge() -> float:
            allowed = known.for_precision(Measured(before, before))
            twice = {label: replace(one, absolute=2 * one.absolute) for label, one in allowed.items()}
            return largest_gap(before, found, twice, where, fewer_infinities=True)

        def learn() -> Iterator[None]:
            exact, step = quantities(original.exact(arguments, state)), UNITS * self.reference.native_epsilon
            for run in original.around(arguments, state, step, PROBES, of_inputs=of_inputs):
                yield known.learn_native(exact, quantities(run))

        reason = judged(judge, learn)[1]
        if reason is not None:
            raise reason

    def _stream(self, first: Arguments, before: Outcome) -> None:
        """Compare runs on the plain random stream, and how far each has advanced it."""
        after = self._tried(lambda: self.runs.stream(first, self.after.state), Data.RECORDED.value)
        check_bits(self.translation.quantities(before, self.reference.state), after.quantities())
        if not torch.equal(before.random_state, after.random_state):
            raise Objection("the random stream does not advance as before")

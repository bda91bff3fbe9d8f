"""Compare a whole model, as it is handed over, with its original: in its own types, with its hooks, in few runs.

The demands and tolerances are those of `verify`, which looks closely where a first run differs by more than is `CLOSE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import GuardError
from ....runtime.values import Arguments, map_tensors
from ....tracing.examples import Inputs
from ..allowances import Jumps, are_far_off, beside_neighbours, is_drowned
from ..demands import (
    TooFar,
    Verdict,
    check_attachment,
    check_form,
    check_memory,
    check_same_quantities,
    check_structure,
    judged,
    judged_within,
    largest_gap,
    results_in,
)
from ..execution import Conditions, StandIns, leaves_tensors, own_tensors, written_parameter
from ..inputs import few_rows, jittered, many_rows, named_tensors, smaller
from ..module_harness import ModuleHarness
from ..outcome import Outcome, Quantities
from ..reference import References
from ..runs import Runs
from ..samples import Peer, Reference, no_peer
from ..tape import SteadyDraws
from ..tolerances import CLOSE, ECHOES, FEW_ROWS, JUMP_UNITS, NATIVE_FACTOR, Tolerance
from ..translation import MapState, Objection, Translation

__all__ = ["Original"]


@dataclass(frozen=True)
class _Sample:
    """One call of the original."""

    arguments: Arguments  # of the call
    run: Outcome  # what came of it, in the model's own types
    is_given: bool  # whether it is an example, and not derived from one
    gradients: bool = True  # whether those that are wanted were taken


@dataclass(frozen=True)
class _Rewritten:
    """A rewritten model, and what is asked of it."""

    runs: Runs
    translation: Translation
    budget: float | None  # None where the rewrites keep the function
    peer: Peer  # see `verify`


@dataclass
class Original:
    """The original model's runs on its example calls, to compare rewritten ones with. Each random draw is served the
    same number: only the distribution is promised. Exact runs are made where those in its own types differ too much.
    """

    model: nn.Module  # the original; it is left exactly as it is
    # the example calls; the first one is also made smaller and with one more row, where the original takes it
    calls: Sequence[Inputs]
    training: bool | None = None  # the mode; None leaves every flag as it is
    gradients: bool = False  # compare the gradients of parameters, too
    seed: int = 0  # of upstream gradients
    # whether the user gave the model in this mode, and there is time. If not, that smaller call is the only one
    is_usual: bool = True
    brief: bool = False  # compare on the example calls alone: the same was done on others when it was decided
    # how far, of the scale, rounding took the results of an equal model: as much needs no closer look
    rounding: float = 0.0
    widest: torch.dtype = torch.float64  # of exact runs, where these are needed
    in_time: Callable[[], object] = lambda: None  # asked before each run; see `Conditions`
    _stage: Runs = field(init=False)
    _is_random: bool = field(default=True, init=False)
    _is_sure: bool = field(default=True, init=False)
    _has_drawn: bool = field(default=False, init=False)
    # how far, of the scale, results on the examples, or on a smaller call alone, were that a closer look found right
    seen: float = field(default=0.0, init=False)
    _samples: list[_Sample] = field(init=False)
    _exact: dict[tuple[int, bool], References] = field(default_factory=dict[tuple[int, bool], References], init=False)

    def __post_init__(self) -> None:
        conditions = Conditions(
            self.training, self.gradients, self.seed, wide=None, of_inputs=False, whole=True, in_time=self.in_time
        )
        self._stage = Runs(ModuleHarness(self.model), conditions)
        self._samples = self._given() if self.is_usual else []
        first = self._arguments[0]
        others = () if self.brief and self._samples else (_one_row_more(call) for call in smaller(first))
        self._samples += self._first_taken(call for call in others if self.is_usual or _size(call) < _size(first))
        if not self._samples:
            self._samples = self._given()

    @property
    def _arguments(self) -> list[Arguments]:
        return [(call.args, call.kwargs) for call in self.calls]

    def _given(self) -> list[_Sample]:
        return [_Sample(call, self._run_original(call), True) for call in self._arguments]

    def _first_taken(self, calls: Iterable[Arguments | None]) -> list[_Sample]:
        for call in calls:
            with suppress(Exception):  # the original need not take every size
                if call is not None:
                    return [_Sample(call, self._run_original(call), False)]
        return []

    def _run_original(self, arguments: Arguments) -> Outcome:
        """Run the original; the first run tells whether it draws random numbers."""
        run = self._run(self._stage, arguments)
        self._is_random = self._has_drawn
        return run

    @cached_property
    def _larger_ones(self) -> list[_Sample]:
        """Return what to compare on where the rewritten model runs none of its graphs on a smaller call."""
        return [*self._others_given, *self._first_taken([_one_row_more(self._arguments[0])])]

    @cached_property
    def _others_given(self) -> list[_Sample]:
        return [] if any(sample.is_given for sample in self._samples) else self._given()

    @cached_property
    def _with_many_rows(self) -> list[_Sample]:
        """Return a call with many rows, without gradients; another mode than the usual goes without."""
        example = self._arguments[0]
        base = next((sample.arguments for sample in self._samples if not sample.is_given), example)
        call = many_rows(base, example, self.seed, numbers=False) if self.is_usual else None
        with suppress(Exception):  # the original need not take so many
            return [] if call is None else [_Sample(call, self._run(self._stage, call, gradients=False), False, False)]
        return []

    def _run(
        self, runs: Runs, arguments: Arguments, state: Mapping[str, Tensor] | None = None, *, gradients: bool = True
    ) -> Outcome:
        with SteadyDraws() if self._is_random else nullcontext() as steady:
            run = runs.native(arguments, state or runs.harness.state, gradients=gradients)
        self._is_sure = self._is_sure and getattr(steady, "is_sure", True)
        self._has_drawn = self._has_drawn or getattr(steady, "has_drawn", False)
        return run

    def repeats(self) -> bool:
        """Say whether the original gives the same again, and draws nothing whose order counts."""
        if not self._is_sure:
            return False
        sample = self._samples[0]
        again, first = self._run(self._stage, sample.arguments).quantities(), sample.run.quantities()
        try:
            largest_gap(first, again, _close(first), "")
        except Objection:
            return False
        return True

    def verdict(
        self, model: nn.Module, *, map_state: MapState = dict, budget: float | None = None, only_runs: bool = False,
        keeps_form: bool = True, peer: Peer = no_peer,
    ) -> Verdict:  # fmt: skip
        """Return what a rewritten model is worth as it stands, in the flags, classes and hooks that it has. The
        rewrites may make an error of `budget` together, relative to the scale, where they do not keep the function
        (None), and in training that of a `peer` besides. Where it changes by design, the model `only_runs`, and its
        results keep their form, unless told not to.
        """
        harness = ModuleHarness(model)
        with own_tensors(harness) if self._only_computes else nullcontext(StandIns()) as kept:
            after = Runs(harness, self._stage.conditions, kept=kept)
            verdict = self._verdict(after, map_state, budget, peer, only_runs=only_runs, keeps_form=keeps_form)
        name = written_parameter(harness, kept)
        return Verdict(False, f"it writes to its parameter '{name}'", checked_in="its own types") if name else verdict

    @property
    def _only_computes(self) -> bool:
        """Say whether the original takes no gradients, is in evaluation, and leaves its tensors as they are."""
        training = self.model.training if self.training is None else self.training
        if self.gradients or training:
            return False
        return leaves_tensors(self._stage.harness, self._stage.kept, [each.run.buffers for each in self._samples])

    def _verdict(
        self, after: Runs, map_state: MapState, budget: float | None, peer: Peer, *, only_runs: bool, keeps_form: bool
    ) -> Verdict:
        stage = self._stage.harness
        try:
            state = {name: tensor.detach() for name, tensor in stage.state.items()}
            known = Reference(self._stage, self._stage.conditions, state, frozenset(stage.plain))
            translation = Translation(known, after.harness, map_state)
            rewritten = _Rewritten(after, translation, budget, peer)
            translation.check_state()
            if only_runs or budget is not None:
                translation.check_round_trip()
            if only_runs:
                self._check_form(rewritten, keeps_form)
                return Verdict(True, "", checked_in="its own types")
            errors = [self._compared(sample, rewritten) for sample in self._samples]
            others = self._with_many_rows if budget is None and not self.brief else []
            others = [*others, *(self._larger_ones if None in errors else [])]
            errors += [self._compared(sample, rewritten) for sample in others]
            error = max((each for each in errors if each is not None), default=0.0)
        except Objection as objection:
            error = objection.error if isinstance(objection, TooFar) else 0.0
            return Verdict(False, str(objection), precision_error=error, checked_in="its own types")
        return Verdict(True, "", precision_error=error, checked_in="its own types")

    def _check_form(self, after: _Rewritten, keeps_form: bool) -> None:
        """Object unless the model runs, and its results keep their form."""
        for sample in (*self._samples, *(self._larger_ones if self._others_given else [])):
            run = self._run_rewritten(after.runs, sample)
            if run is not None and keeps_form:
                check_structure(sample.run, run)
                before = after.translation.quantities(sample.run, self._stage.harness.state)
                check_form(results_in(before), run.quantities())

    def _run_rewritten(self, after: Runs, sample: _Sample) -> Outcome | None:
        """Run the rewritten model; None where it says that it does not take a call that is no example."""
        try:
            return self._run(after, sample.arguments, gradients=sample.gradients)
        except Exception as error:
            if isinstance(error, GuardError) and not sample.is_given:
                return None
            where = "" if sample.is_given else " with another batch size"
            raise Objection(f"the model raises {type(error).__name__}{where}: {error}") from error

    def _compared(self, sample: _Sample, after: _Rewritten) -> float | None:
        """Return how far the model is from the original on one call; None where that tells nothing of its graphs."""
        run = self._run_rewritten(after.runs, sample)
        if run is None:
            return None
        where = "(in its own types, the whole model)" if sample.is_given else "(with another batch size)"
        before, found = after.translation.quantities(sample.run, self._stage.harness.state), run.quantities()
        check_structure(sample.run, run)
        check_attachment(sample.run, run)
        check_same_quantities(before, found)
        if after.budget is not None:
            check_form(results_in(before), found)
            error = self._within(after.budget, sample, after, before, found, where)
        else:
            check_form(before, found)
            check_memory(sample.run, run)
            try:
                error = largest_gap(before, found, _close(before), where)
            except TooFar:
                error = self._rounded_as_before(before, found)
                if error is None:
                    error = self._further_apart(sample, after, before, found)
        return None if run.missed and not sample.is_given else error

    def _rounded_as_before(self, before: Quantities, found: Quantities) -> float | None:
        """Return how far two runs are apart, if no further than such runs of an equal model were; else None."""
        with suppress(TooFar):
            return largest_gap(before, found, _rounded(before, NATIVE_FACTOR * self.rounding), "")
        return None

    def _further_apart(self, sample: _Sample, after: _Rewritten, before: Quantities, found: Quantities) -> float | None:
        """Return how far a run is from the original's where exact runs show it to be right, and note the difference."""
        error = self._seen_in_few_rows(sample, after, before, found)
        if error is None:
            error = self._looked_at_closely(sample, after, _close(before))
        if sample.is_given or (self._is_smaller_alone and error is not None):
            with suppress(TooFar):  # so much is no rounding that others may rely on
                self.seen = max(self.seen, largest_gap(before, found, _rounded(before, 1.0), ""))
        return error

    @property
    def _is_smaller_alone(self) -> bool:
        """Say whether there is no time for the example calls: a smaller one tells what rounding does to the model."""
        return self.training is None and not any(each.is_given for each in self._samples)

    def _within(
        self, budget: float, sample: _Sample, after: _Rewritten, before: Quantities, found: Quantities, where: str
    ) -> float:
        """Return how far two runs are apart, within a budget; gradients may jump as those of the original do."""

        def respond(step: float) -> Iterator[Quantities]:
            return self._around(sample.arguments, step, after.translation)

        def peers() -> Iterator[Quantities]:
            context = after.peer() if self.gradients and sample.gradients else None
            if context is not None:
                with context:
                    run = self._run(self._stage, sample.arguments)
                yield after.translation.quantities(run, self._stage.harness.state)

        error, reason = judged_within(
            before, before, found, budget, respond, where, fewer_infinities=False, peers=peers
        )
        if reason is not None:
            raise reason
        return error

    def _around(self, arguments: Arguments, step: float, translation: Translation) -> Iterator[Quantities]:
        """Run the original on inputs and state that are off by `step`."""
        state = dict(self._stage.harness.state)
        for seed in range(ECHOES):
            near = jittered((arguments, state), step, None, seed)
            yield translation.quantities(self._run(self._stage, *near), state)

    def _seen_in_few_rows(
        self, sample: _Sample, after: _Rewritten, before: Quantities, found: Quantities
    ) -> float | None:
        """Return how far two runs are apart of which a few rows tell enough; None where all rows have to be looked at.
        If gradients of these are the same in float64, those of the whole batch may jump about as far as the original's.
        """
        few, close = few_rows(sample.arguments, FEW_ROWS), _close(before)
        if not (self.gradients and sample.gradients) or 2 * _size(few) >= _size(sample.arguments):
            return None
        with suppress(Exception):  # the models need not take so few; then all rows tell what is wrong
            if are_far_off(before, found, close) or self._run(after.runs, few, gradients=False).missed:
                return None
            known = self._exactly(sample, few)
            if not self._verified(_in_float64_alone(known), after).ok:
                return None
            jumps = Jumps()
            error, reason = judged(
                lambda: largest_gap(before, found, jumps.allowed(before, found, close), ""),
                lambda: self._learned(jumps, known, few, after.translation),
            )
            return error if reason is None else None
        return None

    def _learned(self, jumps: Jumps, known: References, few: Arguments, translation: Translation) -> Iterator[None]:
        """Note how far the original moves on a few rows, run by run; the first one has been made."""
        state, (of_mode,) = self._stage.harness.state, known.runs
        (sample,) = of_mode.samples
        exact = translation.quantities(sample.exact, state)
        if sample.native is not None:
            yield jumps.learn(exact, translation.quantities(sample.native, state), 1.0)
        for near in self._around(few, JUMP_UNITS * of_mode.native_epsilon, translation):
            yield jumps.learn(exact, near, JUMP_UNITS)

    def _exactly(self, sample: _Sample, few: Arguments | None = None) -> References:
        """Return the original's exact run on a call, or on a few rows of it."""
        key, (args, kwargs) = (id(sample), few is not None), few or sample.arguments
        if key not in self._exact:
            self._exact[key] = References.of(
                self.model, [Inputs(*args, **kwargs)], [self.training], is_steady=self._is_random,
                gradients=self.gradients and sample.gradients, seed=self.seed, brief=True, whole=True,
                widest=self.widest, in_time=self.in_time,
            )  # fmt: skip
        return self._exact[key]

    def _verified(self, known: References, after: _Rewritten, least: Mapping[str, Tolerance] | None = None) -> Verdict:
        model, map_state = after.runs.harness.module, after.translation.map_state
        (verdict,) = known.verdicts(model, map_state=map_state, least=least)
        return verdict

    def _looked_at_closely(self, sample: _Sample, after: _Rewritten, close: Mapping[str, Tolerance]) -> float | None:
        """Compare in float64, and in the own types what is not `close`; None where a derived call drowns in rounding,
        as gradients of a norm over few values may: then only float64 tells, and the examples how exact the model is.
        """
        known = self._exactly(sample)
        drowns = not sample.is_given and _drowns(known)
        verdict = self._verified(_in_float64_alone(known) if drowns else known, after, close)
        if not verdict.ok:
            raise TooFar(f"{verdict.reason}, in the whole model", max(verdict.meaning_error, verdict.precision_error))
        return None if drowns else verdict.precision_error


def _drowns(known: References) -> bool:
    """Say whether gradients of the original, in its own types, are mostly rounding."""
    samples = (sample for each in known.runs for sample in each.samples)
    pairs = [(sample.exact, sample.native) for sample in samples if sample.native is not None]
    return any(is_drowned(exact.quantities(), native.quantities()) for exact, native in pairs)


def _in_float64_alone(known: References) -> References:
    runs = [replace(run, samples=tuple(replace(each, native=None) for each in run.samples)) for run in known.runs]
    return replace(known, runs=runs)


def _close(values: Quantities) -> dict[str, Tolerance]:
    """Return what rounding may do to each value; a gradient is as exact as its neighbours."""
    return {
        label: Tolerance(0.0, CLOSE.get(values[label].dtype, 0.0) * unit, unit)
        for label, unit in beside_neighbours(values, 1.0).items()
    }


def _rounded(values: Quantities, error: float) -> dict[str, Tolerance]:
    """Return what each value may differ by where rounding makes such an error of its scale: half its digits at most."""
    return {
        label: Tolerance(0.0, min(error, _half_of(values[label])) * unit, unit)
        for label, unit in beside_neighbours(values, 1.0).items()
    }


def _half_of(value: Any) -> float:
    return torch.finfo(value.dtype).eps ** 0.5 if value.dtype in CLOSE else 0.0


def _size(call: Arguments | None) -> int:
    """Return of how many elements the tensors of a call are."""
    return 0 if call is None else sum(tensor.numel() for tensor in named_tensors(call).values())


def _one_row_more(arguments: Arguments) -> Arguments | None:
    """Return a call with the first row once more at the end of every tensor with as many rows as the first one."""
    leaves = named_tensors(arguments).values()
    rows = next((len(tensor) for tensor in leaves if tensor.dim() and len(tensor)), 0)
    if not rows or any(tensor.layout is not torch.strided for tensor in leaves):
        return None
    return map_tensors(lambda x: torch.cat([x, x[:1]]) if x.dim() and len(x) == rows else x, arguments)

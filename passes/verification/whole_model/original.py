"""Compare a whole model, as it is handed over, with its original: in its own types, with its hooks, in few runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ....errors import GuardError
from ....tracing.values import Arguments, Inputs, flatten, map_tensors
from ..compare import Tolerance
from ..demands import (
    TooFar,
    check_attachment,
    check_form,
    check_same_quantities,
    check_sharing,
    check_structure,
    error_around,
    largest_gap,
    results_in,
)
from ..inputs import jittered
from ..reference import Reference, reference
from ..stage import Stage
from ..tolerances import beside_neighbours, learn_response, within
from ..translation import MapState, Objection, Quantities, Translation, quantities
from ..trial import Run, Trial
from ..verify import Verdict, verify
from .steady import SteadyDraws

__all__ = ["Original"]

_CLOSE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
"""What runs in these types may differ by, relative to the scale, without a look at float64: 4 units in narrow ones."""

_PROBES = 4
"""How often the original is run on inputs and state that are off, where gradients are."""


@dataclass(frozen=True)
class _Sample:
    """One call of the original.

    Attributes:
        arguments: of the call.
        run: what came of it, in the model's own types.
        is_given: whether it is an example, and not derived from one.
    """

    arguments: Arguments
    run: Run
    is_given: bool


@dataclass
class Original:
    """The original model's runs on its example calls, to compare rewritten ones with.

    Of random draws only the distribution is promised: each draw is served the same number. In its own types a rewritten
    model runs once for each call; the exact comparison is made where these runs differ by more than rounding does.

    Attributes:
        model: the original; it is left exactly as it is.
        calls: the example calls; the first one is also made with one more row, where the original takes it.
        training: the mode; None leaves every flag as it is.
        gradients: compare the gradients of parameters, too.
        seed: of upstream gradients.
    """

    model: nn.Module
    calls: Sequence[Inputs]
    training: bool | None = None
    gradients: bool = False
    seed: int = 0
    _stage: Stage = field(init=False)
    _is_random: bool = field(default=False, init=False)
    _is_sure: bool = field(default=True, init=False)
    _has_drawn: bool = field(default=False, init=False)
    _samples: list[_Sample] = field(default_factory=list[_Sample], init=False)
    _exact: dict[int, Reference] = field(default_factory=dict[int, Reference], init=False)

    def __post_init__(self) -> None:
        self._stage = Stage(self.model)
        given: list[Arguments] = [(call.args, call.kwargs) for call in self.calls]
        self._is_random = True
        runs = [self._run(self._stage, given[0])]
        self._is_random = self._has_drawn
        runs += [self._run(self._stage, call) for call in given[1:]]
        self._samples = [_Sample(call, run, True) for call, run in zip(given, runs, strict=True)]
        self._samples += self._with_another_row(given[0])

    def _with_another_row(self, arguments: Arguments) -> list[_Sample]:
        longer = _one_row_more(arguments)
        if longer is None:
            return []
        try:
            return [_Sample(longer, self._run(self._stage, longer), False)]
        except Exception:  # the original need not take every batch size
            return []

    def _run(self, stage: Stage, arguments: Arguments, state: Mapping[str, Tensor] | None = None) -> Run:
        steady = SteadyDraws() if self._is_random else nullcontext()
        with steady:
            run = Trial(stage, self.training, self.gradients, False, self.seed).run(arguments, state or stage.state)
        self._is_sure = self._is_sure and getattr(steady, "is_sure", True)
        self._has_drawn = self._has_drawn or getattr(steady, "has_drawn", False)
        return run

    def repeats(self) -> bool:
        """Say whether the original gives the same again, and draws nothing whose order counts."""
        if not self._is_sure:
            return False
        sample = self._samples[0]
        again, first = (quantities(run, run.parameter_gradients, run.buffers) for run in (
            self._run(self._stage, sample.arguments), sample.run))  # fmt: skip
        try:
            largest_gap(first, again, _close(first), "")
        except Objection:
            return False
        return True

    def verdict(
        self, model: nn.Module, *, map_state: MapState = dict, budget: float | None = None, only_runs: bool = False,
        keeps_form: bool = True,
    ) -> Verdict:  # fmt: skip
        """Return what a rewritten model is worth as it stands, in the flags, classes and hooks that it has.

        Args:
            model: the rewritten one; it is left exactly as it is.
            map_state: from the original's parameters and buffers to the model's.
            budget: the error that the rewrites may make together, relative to the scale; None where they keep the
                function.
            only_runs: the function changes by design: the model need only run, and keep the form of its results.
            keeps_form: whether it must keep that.
        """
        after = Stage(model)
        try:
            translation = Translation(self._as_reference(), after, map_state)
            translation.check_state()
            if only_runs or budget is not None:
                translation.check_round_trip()
            if only_runs:
                return self._running(after, translation, keeps_form)
            error = max(self._compared(sample, after, translation, budget) for sample in self._samples)
        except Objection as objection:
            error = objection.error if isinstance(objection, TooFar) else 0.0
            return Verdict(False, str(objection), precision_error=error, checked_in="its own types")
        return Verdict(True, "", precision_error=error, checked_in="its own types")

    def _as_reference(self) -> Reference:
        state = {name: tensor.detach() for name, tensor in self._stage.state.items()}
        return Reference((), state, frozenset(self._stage.plain), self.training, self.gradients, self.seed)

    def _running(self, after: Stage, translation: Translation, keeps_form: bool) -> Verdict:
        """Return that the model runs, and that its results keep their form."""
        for sample in self._samples:
            run = self._run_rewritten(after, sample)
            if run is not None and keeps_form:
                check_structure(sample.run, run)
                before = translation.quantities(sample.run, self._stage.state)
                check_form(results_in(before), quantities(run, {}, {}))
        return Verdict(True, "", checked_in="its own types")

    def _run_rewritten(self, after: Stage, sample: _Sample) -> Run | None:
        """Run the rewritten model; None where it says that it does not take a call that is no example."""
        try:
            return self._run(after, sample.arguments)
        except Exception as error:
            if isinstance(error, GuardError) and not sample.is_given:
                return None
            where = "" if sample.is_given else " with another batch size"
            raise Objection(f"the model raises {type(error).__name__}{where}: {error}") from error

    def _compared(self, sample: _Sample, after: Stage, translation: Translation, budget: float | None) -> float:
        """Return how far the model is from the original on one call."""
        run = self._run_rewritten(after, sample)
        if run is None:
            return 0.0
        where = "(in its own types, the whole model)" if sample.is_given else "(with another batch size)"
        before = translation.quantities(sample.run, self._stage.state)
        found = quantities(run, run.parameter_gradients, run.buffers)
        check_structure(sample.run, run)
        check_attachment(sample.run, run)
        check_same_quantities(before, found)
        if budget is not None:
            check_form(results_in(before), found)
            return self._within(sample, translation, before, found, budget, where)
        check_form(before, found)
        check_sharing(sample.run, run)
        try:
            return largest_gap(before, found, _close(before), where)
        except TooFar:
            return self._looked_at_closely(sample, after.module, translation)

    def _within(
        self,
        sample: _Sample,
        translation: Translation,
        before: Quantities,
        found: Quantities,
        budget: float,
        where: str,
    ) -> float:
        """Return how far two runs are apart, within a budget; gradients may jump as those of the original do."""
        try:
            return largest_gap(before, found, within(before, budget), where)
        except TooFar:
            error, responses = error_around(before, found, budget), dict[str, float]()
        state = dict(self._stage.state)
        for seed in range(_PROBES if error else 0):
            run = self._run(self._stage, *jittered((sample.arguments, state), error, None, seed))
            learn_response(responses, before, translation.quantities(run, state))
        return largest_gap(before, found, within(before, budget, responses), where)

    def _looked_at_closely(self, sample: _Sample, model: nn.Module, translation: Translation) -> float:
        """Compare in float64, and in the own types with it."""
        number = next(number for number, each in enumerate(self._samples) if each is sample)
        call = Inputs(*sample.arguments[0], **sample.arguments[1])
        with SteadyDraws() if self._is_random else nullcontext():
            if number not in self._exact:
                self._exact[number] = reference(
                    self.model, [call], training=self.training, gradients=self.gradients, seed=self.seed, brief=True,
                    whole=True,
                )  # fmt: skip
            verdict = verify(self._exact[number], model, map_state=translation.map_state)
        if not verdict.ok:
            raise TooFar(f"{verdict.reason}, in the whole model", max(verdict.meaning_error, verdict.precision_error))
        return verdict.precision_error


def _close(values: Quantities) -> dict[str, Tolerance]:
    """Return what rounding may do to each value; a gradient is as exact as its neighbours."""
    return {
        label: Tolerance(0.0, _CLOSE.get(values[label].dtype, 0.0) * unit, unit)
        for label, unit in beside_neighbours(values, 1.0).items()
    }


def _one_row_more(arguments: Arguments) -> Arguments | None:
    """Return a call with the first row once more at the end of every tensor with as many rows as the first one."""
    leaves = [leaf for leaf in flatten(arguments).values() if isinstance(leaf, Tensor)]
    rows = next((len(tensor) for tensor in leaves if tensor.dim() and len(tensor)), 0)
    if not rows or any(tensor.layout is not torch.strided for tensor in leaves):
        return None
    return map_tensors(lambda x: torch.cat([x, x[:1]]) if x.dim() and len(x) == rows else x, arguments)

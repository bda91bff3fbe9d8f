"""What candidates for a group of sites are compared with: the module around it, as it was before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from ...compat import all_modules
from ...tracing.program import Program, deactivate
from ...tracing.values import Inputs
from .. import timing, verification
from ..contract import Pass
from ..rewriting import Edit
from ..sites import Numerics
from ..state import StateMap, twin
from ..verification import is_on_meta, modes_to_check
from .groups import Group

__all__ = ["Comparison", "microseconds", "timing_figures"]


class Comparison:
    """Verify candidates against, and time them beside, the module around a group as it was.

    Args:
        program: which the group is in; nothing is written yet.
        pass_: which found it.
        group: its sites.
        calls: how the module around it is called.
        check: whether candidates are verified; else `unchecked` says why not.
        timed: whether they are timed.
        seed: of verification's random inputs.
        brief: compare on the recorded inputs only: an equal group was verified with noise.
        simulated: what the rewritten module must be equal to; see `Pass.reference`.
    """

    def __init__(
        self, program: Program, pass_: Pass, group: Group, calls: Sequence[Inputs],
        *, check: bool, timed: bool, seed: int, brief: bool = False, simulated: nn.Module | None = None,
    ) -> None:  # fmt: skip
        self._program, self._calls, self._check = program, calls, check
        self.pass_, self.group, self.timed = pass_, group, timed
        self._phase = group.phase or pass_.phase
        self.references = self._references(seed, brief)
        self.simulated = self._simulated(seed, simulated)
        self.before = self.runner()

    @property
    def _owner(self) -> nn.Module:
        """Return the module around the group as it is now: a rewrite may put another in its place."""
        return self._program.module(self.group.owner)

    def _references(self, seed: int, brief: bool) -> list[verification.Reference]:
        brief = brief or self.pass_.numerics is Numerics.SEMANTIC
        return self._references_of(self._owner, seed, brief=brief)

    def _simulated(self, seed: int, model: nn.Module | None) -> list[verification.Reference]:
        """Return the runs of what the rewritten module must be equal to; noise would fill what is zero there."""
        return [] if model is None else self._references_of(model, seed, brief=True)

    def _references_of(self, module: nn.Module, seed: int, *, brief: bool) -> list[verification.Reference]:
        if not self._check or not self._calls or is_on_meta(self._owner):
            return []
        gradients = self._phase.covers_training
        return [
            verification.reference(module, self._calls, training=mode, gradients=gradients, seed=seed, brief=brief)
            for mode in modes_to_check(self._owner, self._phase, self._program.training)
        ]

    def verdict(self, edit: Edit) -> verification.Verdict | None:
        """Return the worst verdict on a rewrite over the phases, or None where nothing can be checked."""
        state_map, pass_ = edit.state_map(), self.pass_
        verdicts = [
            verification.verify(
                reference, self._owner, map_state=state_map.forward, numerics=pass_.numerics,
                budget=pass_.error_budget, keeps_form=pass_.keeps_form,
            )
            for reference in self.references
        ]  # fmt: skip
        # What a lossy pass takes away does not come back: of these only the way there counts.
        verdicts += [
            verification.verify(reference, self._owner, map_state=partial(StateMap.forward, state_map))
            for reference in self.simulated
        ]
        return min(verdicts, key=lambda verdict: (verdict.ok, -verdict.meaning_error), default=None)

    def runner(self) -> timing.Runner | None:
        """Return a function that calls the module as it runs now, to be timed; unchanged modules in it are inactive."""
        if not self.timed:
            return None
        runnable = twin(self._owner)
        deactivate(all_modules(runnable))
        training = self._program.training and self._phase.covers_training
        # What comes before a module in the middle of a network needs its gradients too.
        inner = True if self.group.owner else None
        return timing.runner(runnable, self._calls, training=training, input_gradients=inner)

    def timings(self, runners: Mapping[str, timing.Runner | None]) -> timing.Timings:
        """Time candidates side by side, and beside the module as it was."""
        every = {"before": self.before, **runners}
        return timing.time_candidates({name: runner for name, runner in every.items() if runner is not None})

    def figures(self, verdict: verification.Verdict | None) -> dict[str, Any]:
        """Return what reports and plans say of how a rewrite was checked."""
        if verdict is None:
            return {"checked": self._unchecked()}
        if self.pass_.numerics is Numerics.SEMANTIC and not self.simulated:
            return {"checked": "that it runs: it changes the function by design"}
        return {
            "checked": verdict.checked_in,
            "meaning_error": verdict.meaning_error,
            "precision_error": verdict.precision_error,
        }

    def _unchecked(self) -> str:
        if not self._check:
            return "unverified: verify=False"
        if is_on_meta(self._owner):
            return "unverified: meta"
        return "unverified: never called" if self._program.inputs else "unverified: no example inputs"


def timing_figures(timings: timing.Timings, after: str) -> dict[str, float]:
    """Return the timings of a candidate and of what was before as figures for a plan, their ratio with its interval."""
    speed = timings.ratio("before", after)
    return {
        "speedup": speed.mid, "speedup_low": speed.low, "speedup_high": speed.high,
        "before_us": timings.microseconds("before"), "after_us": microseconds(timings, after),
    }  # fmt: skip


def microseconds(timings: timing.Timings, name: str) -> float:
    """Return the time of a call that agrees with the ratio: samples are compared within their rounds only."""
    return timings.microseconds("before") / timings.ratio("before", name).mid

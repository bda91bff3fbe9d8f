"""Time the whole model, and take back what does not pay after all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from ....compat import all_modules
from ....tracing.examples import Inputs
from ....tracing.program import deactivate
from ....tracing.recording import calls_by_kind
from ... import timing
from ...sites import Cause, Goal, Reason
from ..history import Rewrite
from ..tuner import Tuner
from .races import Race, all_slower, as_timings, together

__all__ = ["WholeModel"]

_RACES = 2
"""So many races must say that the model is slower: one reading of a busy machine does not undo what was gained."""
_WORTH = 0.02
"""Where sites were shown to save more than this part of the model's time, one race more must speak against them."""


class WholeModel:
    """Compare the rewritten model with a twin of what it was, which has the `settled` rewrites, too."""

    def __init__(self, tuner: Tuner, baseline: nn.Module, settled: Collection[Rewrite] = ()) -> None:
        self._tuner, self._context, self._baseline, self._settled = tuner, tuner.context, baseline, settled
        deactivate(all_modules(baseline))

    def timed(self) -> dict[str, Any]:
        """Return the model's timings as it stands."""
        deactivate(self._context.program.names.distinct)
        return self._raced(self._runs()).figures()

    @property
    def _judged(self) -> list[Rewrite]:
        """Return the rewrites that make the difference to the baseline."""
        return [rewrite for rewrite in self._context.history.rewrites if rewrite not in self._settled]

    def never_slower(self) -> dict[str, Any] | None:
        """Return the model's timings; while it is slower, take back the rewrites that are least certain to pay.

        Where it generates, neither a prompt nor a step may be slower.
        """
        rewrites = self._judged
        is_whole = len(rewrites) == 1 and not rewrites[0].owner and rewrites[0].decision.measured.speedup is not None
        if is_whole and len(self._kinds) == 1:
            return as_timings(rewrites[0].decision.figures)  # the group was the whole model
        while doubtful := self._doubtful():
            deactivate(self._context.program.names.distinct)
            races, runs = list[Race](), self._runs()
            while not races or (self._unwanted(races, doubtful) and len(races) < self._races_before(races[0])):
                races.append(self._raced(runs))
            unwanted = self._unwanted(races, doubtful)
            if not unwanted:
                return together(races).figures()
            slower = _slower(races)
            self._take_back(unwanted, Reason(Cause.MODEL_SLOWER, slower))
            if unwanted is doubtful and not self._context.budget.left:
                self._take_back_all(Reason(Cause.MODEL_SLOWER, slower | self._context.budget.values))
        return None

    @property
    def _kinds(self) -> dict[str, list[Inputs]]:
        return calls_by_kind(self._context.program.whole_calls)

    def _unwanted(self, races: Sequence[Race], doubtful: Sequence[Rewrite]) -> Sequence[Rewrite]:
        """Return what every race says is to be taken back, or all together of what nothing else speaks for."""
        if all_slower(races) is not None:
            return doubtful
        return self._unproven() if together(races).speed.mid < 1.0 else []

    def _races_before(self, first: Race) -> int:
        """Return how many races must agree before anything is taken back: one more where its sites say otherwise."""
        saved_us = sum(rewrite.decision.measured.saved_us or 0.0 for rewrite in self._judged)
        return _RACES + (saved_us > _WORTH * first.whole.microseconds("before"))

    def _take_back_all(self, reason: Reason) -> None:
        """Take back whatever could make the model slower: there is no time to learn what does."""
        while doubtful := self._doubtful():
            self._take_back(doubtful, reason)

    def _unproven(self) -> list[Rewrite]:
        """Return the rewrites that only the whole model speaks for: untimed, and with no fewer operations."""
        return [
            each
            for each in self._judged
            if _is_optional(each) and each.decision.measured.untimed and not each.edit.leaves_fewer_operations
        ]

    def _doubtful(self) -> list[Rewrite]:
        """Return the rewrites to take back next, together; equal blocks share one timing.

        First clean-ups that alone keep modules from their original forward, then the untimed, then the least certain.
        """
        fast = [each for each in self._judged if each.pass_.goal is Goal.SPEED]
        owners = {each.owner for each in fast}
        clean_ups = [each for each in self._judged if each.pass_.clean_up and each.owner not in owners]
        optional = [each for each in fast if _is_optional(each)]
        if clean_ups or not optional:
            return clean_ups
        untimed = [each for each in optional if each.decision.measured.untimed]
        if untimed:
            return untimed
        worst = min(optional, key=lambda each: each.decision.measured.speedup_low or 0.0)
        return [each for each in optional if each.evidence is worst.evidence]

    def _runs(self) -> dict[str, Mapping[str, timing.Runner]]:
        """Return what to race, by the label of a kind of calls."""
        program, training = self._context.program, self._context.program.training
        models = {"before": self._baseline, "after": program.model}
        with self._context.budget.spending():
            return {
                label: {name: timing.Runner(model, calls, training=training) for name, model in models.items()}
                for label, calls in self._kinds.items()
            }

    def _raced(self, runs: Mapping[str, Mapping[str, timing.Runner]]) -> Race:
        budget, cold = self._context.budget, self._context.program.measuring.is_cold
        limit = budget.for_the_whole / len(runs)
        with budget.spending():
            return Race(
                {label: timing.time_candidates(pair, limit=limit, cold=cold, clear=1.0) for label, pair in runs.items()}
            )

    def _take_back(self, unwanted: Sequence[Rewrite], reason: Reason) -> None:
        """Undo rewrites that others may stand on: unwind what came later around them, then apply that again."""
        unwound = self._around(unwanted)
        again = [rewrite for rewrite in unwound if rewrite not in unwanted]
        lost = self._tuner.stand_again(unwound, again, verified=True)
        for rewrite in unwanted:
            self._context.history.undo(rewrite, reason)
        for rewrite, why in lost.items():
            self._context.history.undo(rewrite, Reason.of(Cause.DEPENDENT, problem=why))

    def _around(self, unwanted: Sequence[Rewrite]) -> list[Rewrite]:
        """Return rewrites, and those after them that changed some of the same modules, in order."""
        touched: set[nn.Module] = set()
        around: list[Rewrite] = []
        for rewrite in self._context.history.rewrites:
            modules = all_modules(rewrite.edit.owner)
            if rewrite in unwanted or not touched.isdisjoint(modules):
                around.append(rewrite)
                touched.update(modules)
        return around


def _slower(races: Sequence[Race]) -> dict[str, Any]:
    """Return which calls were slower, "" for all, and how fast they are now."""
    label = all_slower(races) or ""
    speed = together(races).speed_of(label)
    return {"calls": label, "speedup": speed.mid, "low": speed.low, "high": speed.high}


def _is_optional(rewrite: Rewrite) -> bool:
    return rewrite.pass_.goal is Goal.SPEED and not rewrite.group.required

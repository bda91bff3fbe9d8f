"""Time the whole model, and take back what does not pay after all."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from ....compat import all_modules
from ....errors import PassError
from ....tracing.program import deactivate
from ... import timing
from ...sites import Goal
from ..groups import Candidate
from ..history import History, Rewrite
from ..tuner import Tuner

__all__ = ["WholeModel"]

_RACES = 2
"""So many races must say that the model is slower: one reading of a busy machine does not undo what was gained."""

_WORTH = 0.02
"""Where sites were shown to save more than this part of the model's time, one race more must speak against them."""


class WholeModel:
    """Compare the rewritten model with what it was.

    Args:
        tuner: has rewritten it.
        history: what was rewritten.
        baseline: a twin of the model as it was; its modules are inactive, to run as the user's model does.
        settled: rewrites that the baseline has, too.
    """

    def __init__(self, tuner: Tuner, history: History, baseline: nn.Module, settled: Collection[Rewrite] = ()) -> None:
        self._tuner, self._history, self._baseline, self._settled = tuner, history, baseline, settled
        deactivate(all_modules(baseline))

    def timed(self) -> dict[str, float]:
        """Return the model's timings as it stands."""
        deactivate(self._tuner.program.names.distinct)
        return _as_timings(timing.timing_figures(self._raced(self._runs())))

    @property
    def _judged(self) -> list[Rewrite]:
        """Return the rewrites that make the difference to the baseline."""
        return [rewrite for rewrite in self._history.rewrites if rewrite not in self._settled]

    def never_slower(self) -> dict[str, float] | None:
        """Return the model's timings; while it is slower, take back the rewrites that are least certain to pay."""
        rewrites = self._judged
        if len(rewrites) == 1 and not rewrites[0].owner and "speedup" in rewrites[0].decision.figures:
            return _as_timings(rewrites[0].decision.figures)  # the group was the whole model
        while doubtful := self._doubtful():
            deactivate(self._tuner.program.names.distinct)
            races, runs = list[timing.Timings](), self._runs()
            while not races or (self._unwanted(races, doubtful) and len(races) < self._races_before(races[0])):
                races.append(self._raced(runs))
            unwanted = self._unwanted(races, doubtful)
            timings = _together(races)
            if not unwanted:
                return _as_timings(timing.timing_figures(timings))
            speed = timings.ratio("before", "after").mid
            self._take_back(unwanted, f"the whole model was slower with it ({speed:.3g}x)")
            if unwanted is doubtful and not self._tuner.budget.left:
                self._take_back_all(speed)
        return None

    def _unwanted(self, races: Sequence[timing.Timings], doubtful: Sequence[Rewrite]) -> Sequence[Rewrite]:
        """Return what every race says is to be taken back, or all together of what nothing else speaks for."""
        if all(race.ratio("before", "after").high < 1.0 for race in races):
            return doubtful
        return self._unproven() if _together(races).ratio("before", "after").mid < 1.0 else []

    def _races_before(self, first: timing.Timings) -> int:
        """Return how many races must agree before anything is taken back: one more where its sites say otherwise."""
        return _RACES + (self._promised() > _WORTH * first.microseconds("before"))

    def _promised(self) -> float:
        """Return the microseconds that the rewrites save, each as it was timed at its site or at an equal one."""
        figures = (rewrite.decision.figures for rewrite in self._judged)
        return sum(each["before_us"] - each["after_us"] for each in figures if "after_us" in each)

    def _take_back_all(self, speed: float) -> None:
        """Take back whatever could make the model slower: there is no time to learn what does."""
        while doubtful := self._doubtful():
            reason = f"the whole model was slower ({speed:.3g}x), and {self._tuner.budget} was spent"
            self._take_back(doubtful, reason)

    def _unproven(self) -> list[Rewrite]:
        """Return the rewrites that only the whole model speaks for: untimed, and with no fewer operations."""
        return [
            each
            for each in self._judged
            if _is_optional(each) and "untimed" in each.decision.figures and not each.edit.leaves_fewer_operations
        ]

    def _doubtful(self) -> list[Rewrite]:
        """Return the rewrites to take back next, together.

        First come clean-ups, which nobody timed, in modules that only they keep from running the original forward; then
        the speed rewrites for which there was no time; then the least certain. Equal blocks share one timing.
        """
        fast = [each for each in self._judged if each.pass_.goal is Goal.SPEED]
        owners = {each.owner for each in fast}
        clean_ups = [each for each in self._judged if each.pass_.clean_up and each.owner not in owners]
        optional = [each for each in fast if _is_optional(each)]
        if clean_ups or not optional:
            return clean_ups
        untimed = [each for each in optional if "untimed" in each.decision.figures]
        if untimed:
            return untimed
        worst = min(optional, key=lambda each: each.decision.figures.get("speedup_low") or 0.0)
        return [each for each in optional if each.evidence is worst.evidence]

    def _runs(self) -> Mapping[str, timing.Runner]:
        program, training = self._tuner.program, self._tuner.program.training
        with self._tuner.budget.spending():
            return {
                "before": timing.runner(self._baseline, program.whole_calls, training=training),
                "after": timing.runner(program.model, program.whole_calls, training=training),
            }

    def _raced(self, runs: Mapping[str, timing.Runner]) -> timing.Timings:
        budget, cold = self._tuner.budget, self._tuner.program.measuring.is_cold
        with budget.spending():
            return timing.time_candidates(runs, limit=budget.for_the_whole, cold=cold, clear=1.0)

    def _take_back(self, unwanted: Sequence[Rewrite], reason: str) -> None:
        """Undo rewrites that others may stand on: unwind what came later around them, then apply that again."""
        unwound = self._around(unwanted)
        for rewrite in reversed(unwound):
            rewrite.edit.undo()
        self._tuner.forget()
        self._history.rewrites = [rewrite for rewrite in self._history.rewrites if rewrite not in unwound]
        for rewrite in unwound:
            if rewrite in unwanted:
                self._history.undo(rewrite, reason, "speed")
            else:
                self._apply_again(rewrite)

    def _around(self, unwanted: Sequence[Rewrite]) -> list[Rewrite]:
        """Return rewrites, and those after them that changed some of the same modules, in order."""
        touched: set[nn.Module] = set()
        around: list[Rewrite] = []
        for rewrite in self._history.rewrites:
            modules = all_modules(rewrite.edit.owner)
            if rewrite in unwanted or not touched.isdisjoint(modules):
                around.append(rewrite)
                touched.update(modules)
        return around

    def _apply_again(self, rewrite: Rewrite) -> None:
        """Apply a rewrite again after another one below it is gone, unless it stood on that one."""
        try:
            candidate = self._tuner.repeat(rewrite.pass_, rewrite.group)
        except PassError as error:
            candidate = Candidate(rewrite.group, str(error))
        if candidate.edit is None:
            self._history.undo(rewrite, f"it depended on a rewrite that was undone: {candidate.failure}")
            return
        rewrite.edit = candidate.edit
        self._history.rewrites.append(rewrite)


def _together(races: Sequence[timing.Timings]) -> timing.Timings:
    """Return the rounds of all races as one."""
    return dataclasses.replace(races[-1], rounds=[each for race in races for each in race.rounds])


def _is_optional(rewrite: Rewrite) -> bool:
    return rewrite.pass_.goal is Goal.SPEED and not rewrite.group.required


def _as_timings(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return what the report says of the whole model."""
    named = ("speedup", "speedup_low", "speedup_high", "threads", "cold")
    speeds = {name: figures[name] for name in named if name in figures}
    return {"before_ms": figures["before_us"] / 1e3, "after_ms": figures["after_us"] / 1e3, **speeds}

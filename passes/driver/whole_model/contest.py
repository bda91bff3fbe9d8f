"""Whether the passes behind one that takes parts of the model for itself make it faster without that."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from ....errors import CalibrationError, PassError, UsageError, one_line
from ....runtime.record import Decision
from ....tracing.isolation import shallow_clone
from ...contract import Pass
from ...sites import Cause, Goal, Numerics, Reason
from ...timing import Interval, no_faster
from ..history import History, Rewrite
from ..tuner import CLEAR, Tuner
from .timed import WholeModel

__all__ = ["Contest"]

_EQUAL = 1.02
"""Within this factor two models are equally fast: a contest keeps the one without, which holds no second copy of the
weights; `run_without` keeps what stood."""
_CALLS = 24.0  # that a race of two models takes at least: six rounds, each with a call before, which is not timed


Run = Callable[[Sequence[int]], None]
"""Runs passes, given by their numbers, on the program as it is."""


@dataclass(frozen=True)
class Earlier:
    """What stood before passes ran once more behind one, at a step: all rewrites and decisions, and the model."""

    step: int
    rewrites: Sequence[Rewrite]
    decisions: Sequence[Decision]
    model: nn.Module

    @property
    def place(self) -> int:
        """Return how many rewrites come before the first one that the pass or one behind it wrote."""
        behind = (number for number, each in enumerate(self.rewrites) if each.decision.step >= self.step)
        return next(behind, len(self.rewrites))

    @property
    def without(self) -> list[Rewrite]:
        """Return what the pass itself wrote, which the others ran without."""
        return [each for each in self.rewrites if each.decision.step == self.step]


@dataclass
class Contest:
    """Take back what contested passes did, let those behind them run again, and race the two models."""

    tuner: Tuner
    passes: Sequence[Pass]

    @property
    def _history(self) -> History:
        return self.tuner.context.history

    @property
    def is_due(self) -> bool:
        """Say whether what a contested pass did stands, gains no more than other passes may, and some are behind it."""
        contested = self._contested
        return bool(contested and self._behind(contested[0].decision.step)) and _gain(contested) < CLEAR

    def decide(self, run: Run) -> bool:
        """Let the faster model stand; return whether that is the one without what contested passes did.

        `run` runs passes, given by their numbers, on the program as it is; where one raises, the other model stays.
        """
        if not self.is_due or not self._has_time:
            return False
        contested = self._contested
        step = contested[0].decision.step
        earlier = self._run_again(step, self._behind(step), contested[0].pass_.name, run)
        if earlier is None:
            return False
        speed = self._speed_beside(earlier.model) if len(self._history.rewrites) > earlier.place else None
        if speed is None or speed.mid < 1 / _EQUAL:
            self._put_back(earlier)
            return False
        for rewrite in contested:
            self._history.undo(rewrite, no_faster(speed, Cause.FASTER_WITHOUT))
        return True

    def run_without(self, before: Sequence[Rewrite], gain: float, run: Run) -> Earlier | None:
        """Let passes run once more behind one that took parts of the model for itself, without what that took: where
        nothing stands any more of what did `before`, or the whole model gains so little that others may gain more.

        Returns what stood; they have as much time again as all had.
        """
        first = self._gone(before) or (self._yielding if gain < CLEAR else None)
        if first is None or self.tuner.context.program.training:
            return None
        step = first.decision.step
        behind = range(step + 1, len(self.passes))
        if any(self.passes[number].numerics is Numerics.SEMANTIC for number in behind):
            return None
        self.tuner.context.budget.begin_again()
        earlier = self._run_again(step, behind, first.pass_.name, run)
        if earlier is not None:
            self.decide(run)
        return earlier

    def choose(self, earlier: Earlier, gain: float, speed: Interval) -> bool:
        """Let the faster model stand; return whether that is the one without. `gain`: of the one before; `speed`: of
        the present one.
        """
        if speed.mid <= gain * _EQUAL:
            self._put_back(earlier)
            return False
        by = Interval(speed.low / gain, speed.mid / gain, speed.high / gain)
        for rewrite in earlier.without:
            self._history.undo(rewrite, no_faster(by, Cause.FASTER_WITHOUT))
        return True

    def _gone(self, before: Sequence[Rewrite]) -> Rewrite | None:
        """Return the first rewrite that went with all others of its pass, which took parts of the model for itself."""
        standing = {each.decision.step for each in self._history.rewrites}
        gone = [
            each for each in before
            if each.decision.step not in standing and each.decision.step < len(self.passes) - 1
            and (each.pass_.contested or each.pass_.numerics is Numerics.APPROXIMATE)
        ]  # fmt: skip
        return min(gone, key=lambda each: each.decision.step, default=None)

    @property
    def _yielding(self) -> Rewrite | None:
        """Return a rewrite of a pass that stands only where no other is faster, and that a contested one is behind."""
        found = (each for each in self._history.rewrites if each.pass_.yields and not each.group.required)
        return next((each for each in found if any(p.contested for p in self.passes[each.decision.step + 1 :])), None)

    def _run_again(self, step: int, behind: Sequence[int], without: str, run: Run) -> Earlier | None:
        """Run passes `behind` one on the model without what that and later ones wrote; return what stood, or None where
        one raises, and what stood stands.
        """
        history = self._history
        model = shallow_clone(self.tuner.context.program.model)
        earlier = Earlier(step, tuple(history.rewrites), tuple(history.decisions), model)
        undone = earlier.rewrites[earlier.place :]
        self.tuner.stand_again(undone, [each for each in undone if each.decision.step < step])
        history.decisions[:] = [each for each in history.decisions if each.step not in behind]
        for number in behind:
            history.landed_at.pop(number, None)
        try:
            run(behind)
        except (CalibrationError, PassError, UsageError) as error:
            self.tuner.context.snapshot.put_back()
            self._put_back(earlier)
            values = {"without": without, "problem": one_line(error)}
            history.skip(self.passes[history.step], Reason(Cause.RAISED_WITHOUT, values))
            return None
        return earlier

    @property
    def _has_time(self) -> bool:
        budget = self.tuner.context.budget
        return budget.for_the_whole >= _CALLS * budget.forward

    @property
    def _contested(self) -> list[Rewrite]:
        """Return what a contest would undo: nothing where somebody asked for some of it by name."""
        found = [each for each in self._history.rewrites if each.pass_.contested]
        return [] if any(each.group.required for each in found) else found

    def _behind(self, step: int) -> list[int]:
        """Return the places of the passes that would rewrite in another way what the one at `step` took."""
        behind = [number for number in range(step + 1, len(self.passes)) if not self.passes[number].contested]
        passes, training = [self.passes[number] for number in behind], self.tuner.context.program.training
        # What saves memory in training costs time: a race would speak against it.
        is_for_speed = all(p.numerics.keeps_function and not (training and p.goal is Goal.MEMORY) for p in passes)
        return behind if is_for_speed and any(p.goal is Goal.SPEED for p in passes) else []

    def _speed_beside(self, other: nn.Module) -> Interval | None:
        """Return how many times as fast as another model the present one is; None where there is no time to race."""
        return WholeModel(self.tuner, other).raced().speed if self._has_time else None

    def _put_back(self, earlier: Earlier) -> None:
        history = self._history
        pairs = zip(history.rewrites, earlier.rewrites, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], pairs))
        lost = self.tuner.stand_again(history.rewrites[same:], earlier.rewrites[same:])
        history.decisions[:] = earlier.decisions
        history.lose(lost)


def _gain(rewrites: Sequence[Rewrite]) -> float:
    """Return how many times as fast the rewritten places are together, as far as they were timed; 1 where none was."""
    measured = [each.decision.measured for each in rewrites if each.decision.measured.saved_us is not None]
    before, after = (sum(getattr(each, name) for each in measured) for name in ("before_us", "after_us"))
    return before / after if after else 1.0

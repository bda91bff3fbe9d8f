"""Whether the passes behind one that takes parts of the model for itself make it faster without that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from ....errors import PassError, UsageError, one_line
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
"""The other model may be slower by this factor: it keeps no second copy of the weights."""
_CALLS = 24.0  # that a race of two models takes at least: six rounds, each with a call before, which is not timed


Run = Callable[[Sequence[int]], None]
"""Runs passes, given by their numbers, on the program as it is."""


@dataclass(frozen=True)
class _Earlier:
    """What stood from a place on before passes ran once more: rewrites, all decisions, and the model with them."""

    place: int
    rewrites: Sequence[Rewrite]
    decisions: Sequence[Decision]
    model: nn.Module


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

    def take_up(self, before: Sequence[Rewrite], run: Run) -> bool:
        """Let passes run once more behind one that took parts of the model for itself, and of which nothing stands any
        more of what did `before`; return whether what they find now stands. They have as much time again as all had.
        """
        gone = self._gone(before)
        if gone is None:
            return False
        step = gone.decision.step
        self.tuner.context.budget.begin_again()
        earlier = self._run_again(step, range(step + 1, len(self.passes)), gone.pass_.name, run)
        if earlier is None:
            return False
        self.decide(run)
        speed = self._speed_beside(earlier.model) if earlier.rewrites else None  # else it is timed next, by itself
        is_found = len(self._history.rewrites) > earlier.place
        if not is_found or (earlier.rewrites and (speed is None or speed.mid <= _EQUAL)):
            self._put_back(earlier)
            return False
        return True

    def _gone(self, before: Sequence[Rewrite]) -> Rewrite | None:
        """Return the first rewrite that went with all others of its pass, which took parts of the model for itself."""
        standing = {each.decision.step for each in self._history.rewrites}
        last = len(self.passes) - 1
        gone = [
            each for each in before
            if each.decision.step not in standing and each.decision.step < last
            and (each.pass_.contested or each.pass_.numerics is Numerics.APPROXIMATE)
        ]  # fmt: skip
        is_training = self.tuner.context.program.training
        return None if is_training else min(gone, key=lambda each: each.decision.step, default=None)

    def _run_again(self, step: int, behind: Sequence[int], without: str, run: Run) -> _Earlier | None:
        """Run passes `behind` one on the model without what that and later ones wrote; return what stood, or None where
        one raises, and what stood stands.
        """
        history = self._history
        steps = [each.decision.step >= step for each in history.rewrites]
        place = steps.index(True) if True in steps else len(steps)
        stood = tuple(history.rewrites[place:])
        model = shallow_clone(self.tuner.context.program.model)
        earlier = _Earlier(place, stood, tuple(history.decisions), model)
        self.tuner.stand_again(stood, [each for each in stood if each.decision.step < step])
        history.decisions[:] = [each for each in history.decisions if each.step not in behind]
        for number in behind:
            history.landed_at.pop(number, None)
        try:
            run(behind)
        except (PassError, UsageError) as error:
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

    def _put_back(self, earlier: _Earlier) -> None:
        history = self._history
        lost = self.tuner.stand_again(history.rewrites[earlier.place :], earlier.rewrites)
        history.decisions[:] = earlier.decisions
        history.lose(lost)


def _gain(rewrites: Sequence[Rewrite]) -> float:
    """Return how many times as fast the rewritten places are together, as far as they were timed; 1 where none was."""
    measured = [each.decision.measured for each in rewrites if each.decision.measured.saved_us is not None]
    before, after = (sum(getattr(each, name) for each in measured) for name in ("before_us", "after_us"))
    return before / after if after else 1.0

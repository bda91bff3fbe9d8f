"""How long a run may take once the model is captured, and on what it was spent."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError

__all__ = ["DEFAULT_BUDGET", "SECONDS", "BudgetRequest", "OutOfTimeError", "Stage", "TimeBudget", "budget_clock"]

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
"""What units of time in texts stand for."""

_LEAST_SECONDS = 2.0
_FORWARDS = "forwards"
_WHOLE_MODEL_FORWARDS = 20.0
"""What timing and comparing the whole model takes: six rounds and four calls to get ready, and both in each mode."""
_COMPARING_FORWARDS = 8.0  # of these, what comparing takes: two models, on the example, with twice the rows, and less
_READY_FORWARDS = 4.0  # of these, what making two models ready for timing takes
_WHOLE_MODEL_SHARE = 0.5  # more than this part of the time is not kept back for the whole model
_LEAST_KEPT, _LEAST_FOR_COMPARING = 0.25, 0.1
"""Nor less than these parts, for both and for comparing: a small model's forwards take the least of it."""
_LEAST_FOR_LEAVING = 0.25
"""However short a budget is, rewrites are written within so many seconds, and the last comparison takes as many."""
_OF_ALL_FOR_LEFT = 1.5  # so much of a budget is over when the check of what was left to the whole model ends
_OF_OTHERS = 0.2
"""What passes took beyond their parts is added to the budget, so that others have theirs: of passes that need not be
done so large a part of it. A conversion by an engine takes seconds, and would allow everything behind it as much."""
_OF_TIMING = 0.75  # sites are timed in this part of the time for sites; the rest is for checking what won
_OF_ONE_RACE = 0.7  # no race takes more than this part of the time that is left for timing: others may follow
_TELLING_SECONDS = 0.25  # a race of this time tells a small gain from none
_MOST_WAITING = 4.0
"""The clock on the wall may show so many times what counts: other programs have the cores, and take no part of it."""
_OF_CLEAN_UPS = 0.75
"""Clean-ups save little: they take no more than this part of the time for sites, and leave the rest to other passes."""


@dataclass(frozen=True)
class BudgetRequest:
    """A time that was asked for: seconds or, if that is more, so many forwards of the model (with their backwards)."""

    seconds: float
    forwards: float = 0.0

    @classmethod
    def of(cls, given: float | str | None) -> BudgetRequest:
        """Read seconds as a number, `"10 min"`, `"40 forwards"`, None for the default; UsageError for anything else."""
        if given is None:
            return DEFAULT_BUDGET
        number, _, unit = str(given).strip().partition(" ")
        try:
            count = math.nan if isinstance(given, bool) else float(number)
        except ValueError:
            count = math.nan
        if not count >= 0 or unit not in ("", _FORWARDS, *SECONDS):
            raise UsageError(f"time_budget={given!r}; use seconds (a number, zero or more), '10 min' or '40 forwards'")
        return cls(0.0, count) if unit == _FORWARDS else cls(count * SECONDS.get(unit, 1.0))

    def __str__(self) -> str:
        return f"{self.forwards:g} {_FORWARDS} of the model, or {self.seconds:g} s if that is more"


DEFAULT_BUDGET = BudgetRequest(_LEAST_SECONDS, 40.0)


class Stage(enum.Enum):
    """What time is spent on."""

    FINDING = "finding sites"
    CHECKING = "checking rewrites"
    TIMING = "timing rewrites"
    WHOLE = "timing the whole model"
    COMPARING = "comparing the whole model"
    WRITING = "writing rewrites, and the rest"


class OutOfTimeError(BaseException):
    """The time for something is over in the middle of it; no code of a model catches it by `except Exception`."""


def budget_clock() -> Callable[[], float]:
    """Return a clock that begins at zero: the time that has passed, without what other programs took of it.

    That is the processor time of all threads here, but never more than the clock on the wall shows, nor less than a
    quarter of it: who waits for a disk, a lock or another process spends time, too.
    """
    wall, processor = time.perf_counter(), time.process_time()

    def clock() -> float:
        passed = time.perf_counter() - wall
        return min(passed, max(time.process_time() - processor, passed / _MOST_WAITING))

    return clock


class TimeBudget:
    """Count the time that a run takes, by what it is spent on, and say when documented rules must do; decision 017."""

    def __init__(
        self,
        seconds: float = math.inf,
        forward: float = 0.0,  # seconds of one call of the model, with its backward in training
        *,
        spent: float = 0.0,
        timing: float = 0.0,  # of those spent, for timing sites
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.seconds, self.forward, self.clock = seconds, forward, clock
        self._spent = spent
        self._stages = dict.fromkeys(Stage, 0.0) | {Stage.TIMING: timing}
        self._running: list[Stage] = []
        self._counted_until = 0.0
        self._beyond, self._until, self._is_owed = 0.0, math.inf, True
        self._until_alone = math.inf  # the part of a pass that is compared with no other one
        self.captured_in = 0.0  # seconds, which are not counted
        self.writing = 0.0  # seconds that the rewrite which was written last took
        self.concessions: dict[str, None] = {}
        """What was compared in another way than usual, for want of time."""

    @classmethod
    def granted(
        cls, request: BudgetRequest, forward: float, clock: Callable[[], float] = time.thread_time
    ) -> TimeBudget:
        """Return the budget for a model, one forward of which takes so many seconds by a clock."""
        return cls(max(request.seconds, request.forwards * forward), forward, clock=clock)

    def counting_from(self, at: float, captured_in: float = 0.0) -> TimeBudget:
        """Count everything from a time on, to the end of the run; the capture before it took so many seconds."""
        self._counted_until, self.captured_in = at, captured_in
        self._running.append(Stage.WRITING)
        return self

    @contextmanager
    def spending(self, stage: Stage) -> Generator[None]:
        """Count what runs meanwhile; of nested uses each second counts once, for the inner one."""
        self._count()
        self._running.append(stage)
        try:
            yield
        finally:
            self._count()
            self._running.pop()

    def _count(self) -> None:
        """Count what has run since it was counted last."""
        now = self.clock()
        if self._running:
            passed, stage = now - self._counted_until, self._running[-1]
            self._spent += passed
            self._stages[stage] += passed
        self._counted_until = now

    @property
    def spent(self) -> float:
        """Return the seconds that have been spent until now."""
        self._count()
        return self._spent

    @spent.setter
    def spent(self, seconds: float) -> None:
        self._spent = seconds

    @property
    def stages(self) -> Mapping[str, float]:
        """Return the seconds that each stage has taken until now, those that took any."""
        self._count()
        return {stage.value: seconds for stage, seconds in self._stages.items() if seconds}

    def for_checks(self) -> float:
        """Return the seconds that may be spent when a check ends, whatever part of them its pass has.

        The rest is for writing once more what was not checked to the end, and for the whole model: checking, timing
        and comparing it.
        """
        return self._in_all - self._kept_for_the_whole - self._kept_for_comparing / 2 - self.writing

    def ending(self, at: Callable[[], float]) -> Callable[[], None]:
        """Return what raises `OutOfTimeError` once so many seconds are spent; never where that is infinity."""

        def ask() -> None:
            end = at()
            if math.isfinite(end) and self.spent >= end:
                raise OutOfTimeError

        return ask

    def allows_writing(self, *, skippable: bool) -> bool:
        """Say whether what no check fits for may still be written, and left to the whole model.

        It may take half of what is kept for timing that, and a quarter of a second in any budget but that of zero. What
        is not `skippable` may take until the check ends of what was left: an engine takes seconds for each region.
        """
        if not skippable:
            return self.spent + self.writing <= self.end_of_check
        end = self._in_all - (self._kept_for_the_whole + self._kept_for_comparing) / 2
        return self.seconds > 0 and self.spent + self.writing <= max(end, _LEAST_FOR_LEAVING)

    @property
    def _kept_for_the_whole(self) -> float:
        return self._kept_back(_WHOLE_MODEL_FORWARDS, _LEAST_KEPT)

    @property
    def _kept_for_comparing(self) -> float:
        return self._kept_back(_COMPARING_FORWARDS, _LEAST_FOR_COMPARING)

    def _kept_back(self, forwards: float, least: float) -> float:
        return min(max(forwards * self.forward, least * self.seconds), _WHOLE_MODEL_SHARE * self.seconds)

    def begin_pass(self, sharing: int = 1, *, owed: bool = True, contested: bool = False) -> None:
        """Give the next pass, which must be done if it is `owed`, its share of the time for sites that is left; the
        rest is for those behind it. Of a `contested` pass one share is for the comparison without it.
        """
        if math.isfinite(self._until):
            most = math.inf if self._is_owed else max(0.0, _OF_OTHERS * self.seconds - self._beyond)
            self._beyond += min(max(0.0, self.spent - self._until), most)
        self._until, self._is_owed = math.inf, owed
        left = max(0.0, self.for_sites - self.spent)

        def end(sharing: int) -> float:
            return self.spent + left / sharing if sharing > 1 else math.inf

        self._until, self._until_alone = end(sharing), end(sharing - contested)

    def begin_again(self) -> None:
        """Allow as much time as was asked for, from now on."""
        self._until, self._beyond = math.inf, max(self._beyond, self.spent)

    def take_share_of_contest(self) -> None:
        """Give the present pass the time for the comparison without it, too: there will be none."""
        self._until = self._until_alone

    @property
    def _in_all(self) -> float:
        return self.seconds + self._beyond

    @property
    def left(self) -> float:
        """Return the seconds that are left in all."""
        return max(0.0, self._in_all - self.spent)

    @property
    def for_sites(self) -> float:
        """Return the seconds that sites may take until the present pass is through; the rest is for what follows."""
        if math.isinf(self.seconds):
            return self._until
        return min(self._until, self._in_all - self._kept_for_the_whole)

    def allows_check(self, *, clean_up: bool) -> bool:
        """Say whether a site may still be checked."""
        return self.spent < self.for_sites * (_OF_CLEAN_UPS if clean_up else 1.0)

    def end_of_writing(self, *, whole: bool, alone: bool = False) -> float:
        """Return how many seconds may be spent when the last lowering of a site is written; where that is the `whole`
        model, none are kept for timing that once more. `alone`: if the pass is compared with no other one.
        """
        if not whole or math.isinf(self.seconds):
            return self.for_sites
        return min(self._until_alone if alone else self._until, self._in_all - self._kept_for_comparing)

    def for_a_race(self, *, whole: bool = False, among: int = 1, has_choice: bool = True) -> float:
        """Return the seconds that the next race may take, `among` so many to come; the `whole` model has no second one.

        Without a choice to make, a race too short to tell a small gain is none: the whole model tells.
        """
        for_sites = self.end_of_writing(whole=whole, alone=True)
        left = min(_OF_TIMING * for_sites - self._stages[Stage.TIMING], for_sites - self.spent)
        seconds = max(0.0, _OF_ONE_RACE * left) / among
        return seconds if has_choice or among == 1 or seconds >= _TELLING_SECONDS else 0.0

    @property
    def for_the_whole(self) -> float:
        """Return the seconds that timing the whole model may take, once it is ready to run."""
        if math.isinf(self.seconds):
            return math.inf
        return max(0.0, self.left - self._kept_for_comparing - _READY_FORWARDS * self.forward)

    @property
    def for_comparing(self) -> float:
        """Return the seconds that the last comparison may take: what was kept back for it, whoever took longer."""
        return max(self.left, self._kept_for_comparing, _LEAST_FOR_LEAVING)

    @property
    def end_of_check(self) -> float:
        """Return how many seconds may be spent when the check of what was left to the whole model ends.

        It may end beyond the budget, since otherwise all that was left would go: 128 heads stayed a loop.
        """
        return max(_OF_ALL_FOR_LEFT * self._in_all, 2 * _LEAST_FOR_LEAVING)

    @property
    def values(self) -> dict[str, Any]:
        """Return the seconds that there are and that were spent, and whether a pass has only its part of them."""
        return {"budget": self.seconds, "spent": self.spent, "in_part": math.isfinite(self._until)}

    @property
    def too_short(self) -> str:
        """Say that a site is not timed for want of time, though some may be left: for later sites, and the model."""
        return f"its share of the time budget of {self.seconds:.3g} s is too short to tell; give a larger time_budget"

    def __str__(self) -> str:
        return f"{'its part of ' if math.isfinite(self._until) else ''}the time budget of {self.seconds:.3g} s"

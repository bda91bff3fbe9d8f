"""How long checks and timing may take, in all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError

__all__ = ["DEFAULT_BUDGET", "BudgetRequest", "TimeBudget"]

_LEAST_SECONDS = 2.0
_FORWARDS = "forwards"
_WHOLE_MODEL_FORWARDS = 20.0
"""What timing and comparing the whole model takes: six rounds and four calls to get ready, and both in each mode."""
_COMPARING_FORWARDS = 4.0  # of these, what comparing takes
_READY_FORWARDS = 4.0  # of these, what making two models ready for timing takes
_WHOLE_MODEL_SHARE = 0.5  # more than this part of the time is not kept back for the whole model
_OF_TIMING = 0.75  # sites are timed in this part of the time for sites; the rest is for checking what won
_OF_ONE_RACE = 0.7  # no race takes more than this part of the time that is left for timing: others may follow
_TELLING_SECONDS = 0.25  # a race of this time tells a small gain from none
_OF_CLEAN_UPS = 0.75
"""Clean-ups save little: they take no more than this part of the time for sites, and leave the rest to other passes."""


@dataclass(frozen=True)
class BudgetRequest:
    """A time that was asked for: seconds or, if that is more, so many forwards of the model (with their backwards)."""

    seconds: float
    forwards: float = 0.0

    @classmethod
    def of(cls, given: float | str | None) -> BudgetRequest:
        """Read seconds as a number, `"40 forwards"`, or None for the default; UsageError for anything else."""
        if given is None:
            return DEFAULT_BUDGET
        number, _, unit = str(given).strip().partition(" ")
        try:
            count = math.nan if isinstance(given, bool) else float(number)
        except ValueError:
            count = math.nan
        if not count >= 0 or unit not in ("", _FORWARDS):
            raise UsageError(f"time_budget={given!r}; use seconds (a number, zero or more) or '40 forwards'")
        return cls(0.0, count) if unit else cls(count)

    def __str__(self) -> str:
        return f"{self.forwards:g} {_FORWARDS} of the model, or {self.seconds:g} s if that is more"


DEFAULT_BUDGET = BudgetRequest(_LEAST_SECONDS, 40.0)


@dataclass
class TimeBudget:
    """Count the time that checks and timing take, and say when documented rules must do; decision 017.

    The clock is processor time: waiting for a busy machine is not spent. Whoever waits for a GPU needs another one.
    """

    seconds: float = math.inf
    forward: float = 0.0  # seconds of one call of the model, with its backward in training
    spent: float = 0.0
    timing: float = 0.0  # of those spent, for timing sites
    finding: float = 0.0  # by passes that look for sites, not among those spent
    clock: Callable[[], float] = time.thread_time
    _depth: int = 0
    _is_timing: bool = False
    _counted_until: float = 0.0
    _beyond: float = 0.0
    _until: float = math.inf

    @classmethod
    def granted(
        cls, request: BudgetRequest, forward: float, clock: Callable[[], float] = time.thread_time
    ) -> TimeBudget:
        """Return the budget for a model, one forward of which takes so many seconds by a clock."""
        return cls(max(request.seconds, request.forwards * forward), forward, clock=clock)

    @contextmanager
    def spending(self, *, timing: bool = False) -> Generator[None]:
        """Count what runs meanwhile, on timing sites or on anything else; of nested uses each second counts once."""
        self._count()
        self._depth += 1
        self._is_timing = timing if self._depth == 1 else self._is_timing
        try:
            yield
        finally:
            self._count()
            self._depth -= 1

    @contextmanager
    def finding_sites(self) -> Generator[None]:
        """Count what a pass runs and times to find its sites."""
        start = self.clock()
        try:
            yield
        finally:
            self.finding += self.clock() - start

    def _count(self) -> None:
        """Count what has run since it was counted last."""
        now = self.clock()
        if self._depth:
            self.spent += now - self._counted_until
            self.timing += now - self._counted_until if self._is_timing else 0.0
        self._counted_until = now

    def begin(self, sharing: int = 1) -> None:
        """Give the next pass its share of the time for sites that is left; the rest is for those behind it."""
        if math.isfinite(self._until):
            self._beyond += max(0.0, self.spent - self._until)
        self._until = math.inf
        if sharing > 1:
            self._until = self.spent + max(0.0, self.for_sites - self.spent) / sharing

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
        kept_back = min(_WHOLE_MODEL_FORWARDS * self.forward, _WHOLE_MODEL_SHARE * self.seconds)
        return min(self._until, self._beyond + self.seconds - kept_back)

    def allows_check(self, *, clean_up: bool) -> bool:
        """Say whether a site may still be checked."""
        return self.spent < self.for_sites * (_OF_CLEAN_UPS if clean_up else 1.0)

    def for_a_race(self, *, whole: bool = False, among: int = 1, has_choice: bool = True) -> float:
        """Return the seconds that the next race may take, `among` so many to come; the `whole` model has no second one.

        Without a choice to make, a race too short to tell a small gain is none: the whole model tells.
        """
        kept_back = min(_COMPARING_FORWARDS * self.forward, _WHOLE_MODEL_SHARE * self.seconds)
        is_all = whole and math.isfinite(self.seconds)
        for_sites = min(self._until, self._in_all - kept_back) if is_all else self.for_sites
        left = min(_OF_TIMING * for_sites - self.timing, for_sites - self.spent)
        seconds = max(0.0, _OF_ONE_RACE * left) / among
        return seconds if has_choice or among == 1 or seconds >= _TELLING_SECONDS else 0.0

    @property
    def for_the_whole(self) -> float:
        """Return the seconds that timing the whole model may take, once it is ready to run."""
        if math.isinf(self.seconds):
            return math.inf
        return max(0.0, self.left - (_COMPARING_FORWARDS + _READY_FORWARDS) * self.forward)

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

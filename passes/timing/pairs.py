"""Two ways of computing the same, timed beside each other, and what plans say of that."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..sites import Cause, Reason
from .conditions import race_clock
from .intervals import FEWEST_ROUNDS, SURE_ROUNDS, Interval, Timings
from .measure import time_candidates
from .runner import Runner

__all__ = [
    "kinds_within", "microseconds", "no_faster", "no_gain", "rough_ratio", "time_kind", "time_pair",
    "timing_figures", "within_left",
]  # fmt: skip

_SECONDS = 0.05
"""How long a kind of layer is timed by itself at first: calls of up to 3 ms settle in three rounds."""
_IN_DOUBT = 4
"""Where that does not tell whether it gains, so many times as long: two runs on a busy machine then decide alike."""
_CLOSE = 0.15  # what is farther from the least gain is not timed again, however few rounds of a long call there were
_OF_LEFT = 0.1
"""Of the time that is left for sites one kind takes no more than this part, for others follow."""
_left: ContextVar[Callable[[], float]] = ContextVar("fxopt_left_for_kinds", default=lambda: math.inf)


@contextmanager
def kinds_within(left: Callable[[], float]) -> Generator[None]:
    """Let kinds be timed within the seconds that are `left`, as far as the fewest rounds allow."""
    token = _left.set(left)
    try:
        yield
    finally:
        _left.reset(token)


def time_pair(
    before: Callable[[], object],
    after: Callable[[], object],
    *,
    seconds: float,
    least_rounds: int = SURE_ROUNDS,
    cold: bool = False,
) -> Timings:
    """Time what is there `before` and `after` a rewrite by itself, in about so many seconds, at most twice that.

    So many rounds are taken while there is time; of long calls three must do: the whole model tells the rest.
    """
    runs = {"before": before, "after": after}
    return time_candidates(
        runs, seconds=seconds, least_rounds=least_rounds, limit=2 * seconds, fewest=FEWEST_ROUNDS, cold=cold
    )


def time_kind(before: Callable[[], object], after: Callable[[], object], *, least: float | None, cold: bool) -> Timings:
    """Time layers of a kind by themselves; again, longer, where it is open if `after` is `least` times faster.

    None: that is not decided by them alone, and half the time must do. All of it ends in time, see `kinds_within`.
    """
    if least is None:
        return time_pair(before, after, seconds=within_left(_SECONDS / 2), cold=cold)
    timings = time_pair(before, after, seconds=within_left(_SECONDS), cold=cold)
    speed = timings.ratio("before", "after")
    if not speed.low <= least <= speed.high or abs(speed.mid - least) >= _CLOSE:
        return timings
    rounds = SURE_ROUNDS * _IN_DOUBT
    longer = within_left(_IN_DOUBT * _SECONDS)
    return time_pair(before, after, seconds=longer, least_rounds=rounds, cold=cold) if longer > _SECONDS else timings


def within_left(seconds: float, part: float = _OF_LEFT) -> float:
    """Return so many seconds, or as many of them as a kind may take now: this part of what is left."""
    return max(0.0, min(seconds, part * _left.get()()))


def rough_ratio(before: Runner, after: Runner) -> float:
    """Return how many times as fast one is as the other, from two calls of each."""
    clock, seconds = race_clock(waits_for_gpu=bool(before.gpus)), dict[Runner, float]()
    for each in (before, after) * 2:
        with each.leaving_no_trace():
            start = clock()
            each()
            seconds[each] = min(seconds.get(each, math.inf), clock() - start)
    return seconds[before] / max(seconds[after], 1e-9)


def no_gain(
    speed: Interval, least: float = 1.0, *, surely: bool = True, cause: Cause | None = None, **values: Any
) -> Reason | None:
    """Return why what is so many times as fast does not pay; None where it gains more than `least`, see `Interval`."""
    return None if speed.gains(least, surely=surely) else no_faster(speed, cause, **values)


def no_faster(speed: Interval, cause: Cause | None = None, **values: Any) -> Reason:
    """Return the reason of what was timed and does not pay: for a cause, or as the interval says, and what else led
    to it. Whoever takes something back for its speed makes the reason here; `reporting/` makes the words.
    """
    cause = cause or (Cause.NO_FASTER if speed.mid <= 1.0 else Cause.NOT_CLEARLY_FASTER)
    return Reason.of(cause, speedup=speed.mid, low=speed.low, high=speed.high, **values)


def timing_figures(timings: Timings, after: str = "after", count: int = 1) -> dict[str, Any]:
    """Return a candidate's times and ratio to `before` as a plan's figures, of one of `count` layers in a call."""
    speed = timings.ratio("before", after)
    return {
        **speed.figures,
        "before_us": timings.microseconds("before") / count, "after_us": microseconds(timings, after) / count,
        **({"threads": 1} if timings.in_one_thread else {}), **({"cold": True} if timings.cold else {}),
    }  # fmt: skip


def microseconds(timings: Timings, name: str) -> float:
    """Return the time of a call that agrees with the ratio: samples are compared within their rounds only."""
    return timings.microseconds("before") / timings.ratio("before", name).mid

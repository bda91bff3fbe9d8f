"""What samples of several candidates tell: ratios within rounds, and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Any

__all__ = ["CLEARLY_SLOWER", "FEWEST_ROUNDS", "NOISE", "SURE_ROUNDS", "Interval", "Timings"]

FEWEST_ROUNDS = 3
"""Fewer rounds have no interval at all."""
SURE_ROUNDS = 6
"""Fewer rounds cannot give a 95% interval for a median of any distribution: 2 * 0.5**6 = 0.03."""
_ROUNDS_BUT_ONE = 9
"""Of so many rounds a 95% interval leaves the lowest and the highest out: 2 * (1 + 9) * 0.5**9 = 0.04."""
_HOPELESS = 1.5
"""What took half as long again as the fastest in each of the fewest rounds is not tried further, if others are left."""
CLEARLY_SLOWER = 1.05
NOISE = 1.02
"""Two candidates closer than 2% count as equally fast."""
_T_AT_99 = {3: 9.925, 4: 5.841, 5: 4.604}
"""Rounds -> the 99.5% quantile of Student's distribution with one degree of freedom less."""


@dataclass(frozen=True)
class Interval:
    """A ratio, and where it lies with 95% confidence; with 99% where it is of fewer than six rounds."""

    low: float
    mid: float
    high: float

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> Interval:
        """Read it from the figures of a plan."""
        return cls(figures["speedup_low"], figures["speedup"], figures["speedup_high"])

    @property
    def figures(self) -> dict[str, float]:
        """Return what plans have of it."""
        return {"speedup": self.mid, "speedup_low": self.low, "speedup_high": self.high}

    def gains(self, least: float = 1.0, *, surely: bool = True) -> bool:
        """Say whether so many times as fast is more than `least`: the whole interval, or no more than its middle."""
        return (self.low if surely else self.mid) > least

    @property
    def loses(self) -> bool:
        """Say whether it is surely slower."""
        return self.high < 1.0


@dataclass
class Timings:
    """Samples of several candidates, taken in rounds, which disturbances outlast: one sample of each, one by one.

    Ratios within rounds have a median with a sign-test interval (Conover, Practical Nonparametric Statistics, 3.2).
    """

    rounds: list[dict[str, float]] = field(default_factory=list[dict[str, float]])  # seconds of a call, by name
    in_one_thread: bool = False  # samples in more told of other programs
    cold: bool = False  # caches were emptied before each call

    def ratio(self, before: str, after: str) -> Interval:
        """Return how many times faster `after` is than `before`, from the rounds that timed both."""
        return self._interval(before, after, 0.95)

    def seconds(self, name: str) -> float:
        """Return the median time of one call."""
        return median(sample[name] for sample in self.rounds if name in sample)

    def microseconds(self, name: str) -> float:
        """Return the median time of one call, in microseconds."""
        return self.seconds(name) * 1e6

    def fastest(self, prefer: Sequence[str]) -> str:
        """Return the fastest of `prefer`; of those that are not shown to be 2% slower than it, the first."""
        best = self.quickest(prefer)

        def is_slower(name: str) -> bool:
            return self.ratio(name, best).gains(NOISE) or self.is_hopeless(name, best)

        return next(name for name in prefer if name == best or not is_slower(name))

    def quickest(self, names: Sequence[str]) -> str:
        """Return the one of `names` that took the least time, however close the others are."""
        common = max(names, key=lambda name: sum(name in sample for sample in self.rounds))
        return min(names, key=lambda name: self.ratio(name, common).mid)

    def hangs_on_one(self, before: str, names: Sequence[str]) -> bool:
        """Say whether one round alone speaks against a clear gain of the quickest: a few more tell whether it was
        disturbed.
        """
        if not SURE_ROUNDS <= len(self.rounds) < _ROUNDS_BUT_ONE:
            return False
        lowest, *others = self._ratios(before, self.quickest(names)) or [math.inf]
        return lowest <= 1.0 and min(others) > CLEARLY_SLOWER

    def _ratios(self, before: str, after: str) -> list[float]:
        """Return how many times faster `after` was in each round that timed both, in order."""
        return sorted(s[before] / s[after] for s in self.rounds if before in s and after in s)

    def _interval(self, before: str, after: str, confidence: float) -> Interval:
        ratios = self._ratios(before, after)
        if not ratios:
            return Interval(0.0, math.nan, math.inf)
        rank = _sign_test_rank(len(ratios), confidence)
        if rank == 0:
            return _of_few(ratios)
        return Interval(ratios[rank - 1], median(ratios), ratios[-rank])

    def equal(self, one: str, other: str) -> bool:
        """Say whether two candidates are equally fast, to 2% with 99% confidence."""
        interval = self._interval(one, other, 0.99)
        return interval.low > 1 / NOISE and interval.high < NOISE

    def is_hopeless(self, name: str, best: str) -> bool:
        """Say whether a candidate was far slower than the fastest in each of several rounds."""
        ratios = [sample[name] / sample[best] for sample in self.rounds if name in sample and best in sample]
        return len(ratios) >= FEWEST_ROUNDS and min(ratios) > _HOPELESS

    def is_settled(self, names: Sequence[str], clear: float = CLEARLY_SLOWER) -> bool:
        """Say whether a few rounds are enough: one candidate is faster than each of the others by a factor, surely."""
        best = self.quickest(names)
        others = [name for name in names if name != best]
        return bool(others) and all(self._interval(name, best, 0.99).low > clear for name in others)

    def survivors(self, names: Sequence[str]) -> list[str]:
        """Return the candidates that are not clearly (99% confidence) slower than the fastest by 5% or more."""
        best = self.quickest(names)
        return [name for name in names if self._interval(name, best, 0.99).low <= CLEARLY_SLOWER]


def _of_few(ratios: Sequence[float]) -> Interval:
    """Return Student's interval of a few ratios, of their logarithms, with 99% confidence; none of less than three."""
    if len(ratios) not in _T_AT_99:
        return Interval(0.0, median(ratios), math.inf)
    logarithms = [math.log(ratio) for ratio in ratios]
    half = _T_AT_99[len(ratios)] * stdev(logarithms) / math.sqrt(len(ratios))
    mean = fmean(logarithms)
    return Interval(math.exp(mean - half), median(ratios), math.exp(mean + half))


def _sign_test_rank(count: int, confidence: float) -> int:
    """Return r such that the median lies between the r-th smallest and r-th largest value; 0 if too few are given."""
    tail = 0.0
    for rank in range(count // 2 + 1):
        tail += math.comb(count, rank) * 0.5**count
        if 2 * tail > 1 - confidence:
            return rank
    return count // 2

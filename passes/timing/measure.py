"""Decide which of several ways to run the same thing is fastest, on a machine that is never quiet."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch

from ...collection import collection_paused
from .conditions import Clock, Eviction, is_work_of_this_thread, one_thread, race_clock
from .intervals import CLEARLY_SLOWER, FEWEST_ROUNDS, NOISE, SURE_ROUNDS, Interval, Timings
from .runner import Runner

if sys.platform == "linux":
    import resource

__all__ = [
    "CALLS_OF_CLEAR", "CALLS_OF_EACH", "CALLS_OF_TWO", "Interval", "Runner", "Timings", "in_threads_that_gain",
    "time_candidates",
]  # fmt: skip

Candidate = Callable[[], object]
_SAMPLE_SECONDS = 200e-6
"""Calls are repeated until one sample takes this long, a thousand times what the clock resolves."""
_WARM_UP_SECONDS = 2e-3
"""Calls shorter than this are made once more before each sample, for the candidate before has taken the caches."""
_LEAST_ROUNDS = 9  # fewer pairs cannot give a 99% interval for a median: 2 * 0.5**9 = 0.004
_SHORT_SECONDS = 5e-3
"""Calls shorter than this are never given up so early: more rounds cost little, and one stall is as long as a call."""
_STALL_SECONDS = 8e-3
_STALLED = 4.0
"""Where threads are put off and woken it takes this long. A call that takes four times what it can do tells of that."""
_NO_GAIN = 1.25
"""Where threads take this much longer by the clock than one uses of the processor, other programs have the cores."""
CALLS_OF_EACH, CALLS_OF_TWO = 2 + FEWEST_ROUNDS, 2 * (SURE_ROUNDS - FEWEST_ROUNDS)
"""So many calls are made at least of each candidate, which is run twice to get ready, and then of the two best."""
CALLS_OF_CLEAR = 1 + FEWEST_ROUNDS
"""So many are made of each where they leave no doubt which one is the fastest."""
_READY_FROM = 20e-3  # a call that takes so many seconds and has run once is ready
_LONG_ROUND_SECONDS = 50e-3
"""Of rounds of this length no more than the fewest are taken in any case: a stall is a small part of each."""
_SETTLING_SECONDS = 2e-3
"""One sample of such a call says what it takes. Shorter ones are sampled as often as asked: that costs little."""
_MOST_ROUNDS = 400
_TRIES = 3
_PATIENCE = 4.0
"""Where it is open whether the first candidate is beaten, or which one does it best, sampling may take four times as
long, of long rounds twice as long; and where the thread waits for its turn, the clock may show four times the processor
time that it has used."""


class _Effort(NamedTuple):
    """How much is done to tell candidates apart; see `time_candidates`."""

    seconds: float
    least_rounds: int
    fewest: int
    limit: float
    clear: float
    worth: float


def time_candidates(
    candidates: Mapping[str, Candidate],
    *,
    seconds: float = 0.25,
    least_rounds: int = _LEAST_ROUNDS,
    limit: float = math.inf,
    fewest: int = SURE_ROUNDS,
    cold: bool = False,
    clear: float = CLEARLY_SLOWER,
    worth: float = 0.0,
) -> Timings:
    """Time candidates side by side, in rounds of one sample each, until the answer is clear, or the time is up.

    Args:
        candidates: name -> what to call; a `Runner` is left without a trace on its module.
        seconds: of sampling; four times as many while it is open whether something beats the first candidate.
        least_rounds: taken whatever the time, unless three to five long ones leave no doubt.
        limit: seconds of processor time after which the fewest rounds must do.
        fewest: how many that are; of less than six the interval assumes a distribution.
        cold: empty the caches before each call, as other work between two calls does.
        clear: by what factor one must be the fastest for three to five long rounds to leave no doubt.
        worth: three long rounds must do where none is, by its median, so many times as fast as the first.
    """
    evict = Eviction(_gpus_of(candidates.values())) if cold else None
    with ExitStack() as stack:
        for candidate in candidates.values():
            if isinstance(candidate, Runner):
                stack.enter_context(candidate.leaving_no_trace())
        stack.enter_context(collection_paused())
        effort, may_stall = _Effort(seconds, least_rounds, fewest, limit, clear, worth), torch.get_num_threads() > 1
        timings = _raced(candidates, effort, evict, may_stall=may_stall)
        if timings is None:
            stack.enter_context(one_thread())
            timings = _raced(candidates, effort, evict) or Timings()
            timings.in_one_thread = True
    timings.cold = cold
    return timings


def _raced(
    candidates: Mapping[str, Candidate], effort: _Effort, evict: Eviction | None, *, may_stall: bool = False
) -> Timings | None:
    """Return the samples; None where calls `may_stall`, and do."""
    first = next(iter(candidates))
    if may_stall and _is_slower_in_threads(candidates[first]):
        return None
    timings, samplings = Timings(), _samplings(candidates, evict)
    end = time.thread_time() + effort.limit  # stalled calls until now take nothing from it
    racing, shuffling, time_used = list(samplings), random.Random(0), _Stopwatch()  # noqa: S311 - it hides no secret
    while len(timings.rounds) < _MOST_ROUNDS:
        order = shuffling.sample(racing, len(racing))
        timings.rounds.append({name: samplings[name].sample() for name in order})
        racing = _hopeful(timings, racing, samplings)
        if may_stall and _has_stalled(timings, samplings):
            return None
        if not _tells(samplings):  # an engine may compute in the calling thread first, and in another one later
            timings, samplings = Timings(), _with_clock(candidates, time.perf_counter, evict)
            continue
        if _is_settled(timings, racing, samplings, effort.clear):
            break
        if timings.hangs_on_one(first, racing):
            continue
        is_late = len(timings.rounds) >= effort.fewest and time.thread_time() > end
        is_long = sum(timings.rounds[-1].values()) > _LONG_ROUND_SECONDS
        if is_late or (is_long and _is_futile(timings, first, racing, effort.worth)):
            break
        if len(timings.rounds) < (min(effort.least_rounds, SURE_ROUNDS) if is_long else effort.least_rounds):
            continue
        racing = timings.survivors(racing)
        patience = (2.0 if is_long else _PATIENCE) if _is_in_doubt(timings, first, racing) else 1.0
        if time_used.seconds() > patience * effort.seconds or _is_clear(timings, racing):
            break
    return timings


def _gpus_of(candidates: Iterable[Candidate]) -> set[torch.device]:
    return {gpu for each in candidates if isinstance(each, Runner) for gpu in each.gpus}


def _samplings(candidates: Mapping[str, Candidate], evict: Eviction | None) -> dict[str, _Sampling]:
    """Return how candidates are sampled: all of them by the same clock."""
    clock = race_clock(waits_for_gpu=bool(_gpus_of(candidates.values())))
    samplings = _with_clock(candidates, clock, evict)
    return samplings if _tells(samplings) else _with_clock(candidates, time.perf_counter, evict)


def _with_clock(candidates: Mapping[str, Candidate], clock: Clock, evict: Eviction | None) -> dict[str, _Sampling]:
    return {name: _Sampling.of(candidate, clock, evict) for name, candidate in candidates.items()}


def _tells(samplings: Mapping[str, _Sampling]) -> bool:
    """Say whether the clock tells what calls take: that of this thread does not where others work for them."""
    return all(each.works_in_this_thread or each.clock is not time.thread_time for each in samplings.values())


def _is_settled(timings: Timings, racing: Sequence[str], samplings: Mapping[str, _Sampling], clear: float) -> bool:
    """Say whether the first rounds leave no doubt, of calls that are long enough for one sample to tell something."""
    is_short = any(samplings[name].least < _SETTLING_SECONDS for name in racing)
    return len(timings.rounds) >= FEWEST_ROUNDS and not is_short and timings.is_settled(racing, clear)


def _is_futile(timings: Timings, first: str, racing: Sequence[str], worth: float) -> bool:
    """Say whether nothing seems to be worth more samples, being hardly faster than the first candidate."""
    best = timings.quickest(racing)
    return len(timings.rounds) >= FEWEST_ROUNDS and timings.ratio(first, best).mid < worth


class _Stopwatch:
    """Tell the time that a thread has used: on a busy machine it waits for most of what the clock shows."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.thread_time()

    def seconds(self) -> float:
        """Return seconds of processor time, or a quarter of the clock's where the thread mostly waits, as for a GPU."""
        return max(time.thread_time() - self._processor, (time.perf_counter() - self._wall) / _PATIENCE)


def _is_slower_in_threads(candidate: Candidate) -> bool:
    """Say whether a call takes longer than one thread alone: operations stall, or other programs have the cores."""
    sampling = _Sampling(candidate, race_clock())
    seconds = min(sampling.sample(), sampling.sample())
    if seconds < _STALL_SECONDS:
        return False
    with one_thread():
        sampling = _Sampling(candidate, race_clock())
        return seconds > _NO_GAIN * sampling.sample()


@contextmanager
def in_threads_that_gain(candidate: Candidate) -> Generator[None]:
    """Let torch compute in one thread for a while, where a call takes longer in several."""
    stalls = torch.get_num_threads() > 1 and _is_slower_in_threads(candidate)
    with one_thread() if stalls else nullcontext():
        yield


def _has_stalled(timings: Timings, samplings: Mapping[str, _Sampling]) -> bool:
    """Say whether threads of a short call were put off and woken (8 ms or more): then no ratio of samples tells."""
    for name, sampling in samplings.items():
        samples = [sample[name] for sample in timings.rounds if name in sample]
        is_short = len(samples) >= SURE_ROUNDS and sampling.least < _WARM_UP_SECONDS
        if is_short and median(samples) > _STALLED * sampling.least:
            return True
    return False


def _hopeful(timings: Timings, racing: Sequence[str], samplings: Mapping[str, _Sampling]) -> list[str]:
    """Return the candidates without long ones that cannot win; the first stays, and one other to compare it with."""
    first, *others = racing
    if len(others) < 2:
        return list(racing)
    best, leader = timings.quickest(racing), timings.quickest(others)
    kept = {name for name in others if samplings[name].least < _SHORT_SECONDS or not timings.is_hopeless(name, best)}
    return [first, *(name for name in others if name == leader or name in kept)]


def _interruptions() -> int:
    """Return how often the operating system has taken this thread off its core; 0 where it does not tell."""
    if sys.platform != "linux":
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _is_clear(timings: Timings, survivors: Sequence[str]) -> bool:
    """Say whether more samples would change nothing: one is left, or those left are equally fast."""
    first, *others = survivors
    return all(timings.equal(first, other) for other in others)


def _is_in_doubt(timings: Timings, first: str, survivors: Sequence[str]) -> bool:
    """Say whether noise leaves open if something beats the first candidate, or which one that is."""
    best = timings.quickest(survivors)
    interval = timings.ratio(first, best)
    if interval.low <= 1.0 and interval.mid > NOISE and interval.high > 1.1 * interval.low:
        return True
    others = [name for name in survivors if name != first]
    return bool(others) and timings.ratio(timings.fastest(others), best).mid > CLEARLY_SLOWER


@dataclass
class _Sampling:
    """How one candidate is sampled: by which clock, in how many calls a sample (one, if caches are emptied)."""

    candidate: Candidate
    clock: Clock
    calls: int = 1
    warm_up: bool = False
    least: float = math.inf  # seconds of its fastest call, or its processor time where that is less
    works_in_this_thread: bool = True
    evict: Eviction | None = None

    @classmethod
    def of(cls, candidate: Candidate, clock: Clock, evict: Eviction | None = None) -> _Sampling:
        once = cls(candidate, clock, evict=evict)
        if isinstance(candidate, Runner) and candidate.seconds > _READY_FROM:
            return once  # it has just run, to get ready; the first round tells in which threads it works
        once.sample()
        if evict is not None or once.least > _SETTLING_SECONDS:
            return once
        seconds = max(min(once.sample() for _ in range(3)), 1e-9)
        once.calls, once.warm_up = max(1, math.ceil(_SAMPLE_SECONDS / seconds)), once.least < _WARM_UP_SECONDS
        return once

    def sample(self) -> float:
        """Return the seconds that one call takes; a short sample that was interrupted is taken again."""
        if self.warm_up:
            self.candidate()
        seconds, is_short = math.inf, self.least < _WARM_UP_SECONDS and (self.warm_up or self.evict is not None)
        for _ in range(_TRIES if is_short else 1):
            if self.evict is not None:
                self.evict()
            before = _interruptions()
            seconds = min(seconds, self._once())
            if _interruptions() == before:
                break
        return seconds

    def _once(self) -> float:
        start, start_of_thread, start_of_process = self.clock(), time.thread_time(), time.process_time()
        for _ in range(self.calls):
            self.candidate()
        seconds, here = self.clock() - start, time.thread_time() - start_of_thread
        if not is_work_of_this_thread(here, time.process_time() - start_of_process):
            self.works_in_this_thread = False
        # Some systems count processor time in large steps.
        self.least = min(self.least, seconds / self.calls, here / self.calls or seconds / self.calls)
        return seconds / self.calls

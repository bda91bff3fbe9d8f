"""Which layers gain from packing: each kind is checked and timed once, by itself."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ...operators import laid_last
from ...passes.kinds import LEAST_GAIN, no_gain, over_budget
from ...passes.sites import Cause, Refusal
from ...passes.timing import SECONDS_OF_A_KIND, Interval, Timings, race_clock, time_kind, time_pair

__all__ = ["MOST", "PACKED", "TRANSPOSED", "Calls", "Gains", "Times", "times_interleaved"]

MOST = 4
"""So many layers of a kind are called in turn: in use, weights do not wait in the caches either."""

PACKED, TRANSPOSED = "packed", "transposed"
"""The lowerings of a layer: on a packed weight, and at one row on a transposed one."""

_ROUNDS = (8, 30)
"""So many are taken at least, and at most."""

_SECONDS = 0.05
"""How long each kind is timed."""

_BEFORE = "before"

_InTurn = Sequence[Callable[[], object]]
"""One of each layer of a kind."""

Compute = Callable[..., object]


class _Check(Protocol):
    """Say how far off a packed layer is: in words, or "" where that is rounding; or relative to the scale."""

    def fault(self, x: Tensor, laid: Tensor) -> str: ...

    def error(self, x: Tensor, laid: Tensor) -> float: ...


@dataclass(frozen=True)
class Times:
    """How many times faster a layer is packed, and its seconds as it is and packed."""

    gain: Interval
    own: float
    packed: float


@dataclass(frozen=True)
class Calls:
    """Layers of one kind, each by its tensors, in two ways of computing; `lies_last`: the new one, channels last."""

    shape: tuple[int, ...]
    before: Compute
    after: Compute
    tensors: Sequence[tuple[Tensor | None, ...]]
    check: _Check
    lies_last: bool = False
    gain_together: bool = False

    def given(self) -> tuple[Tensor, Tensor]:
        """Return what the layers are given in each way."""
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(0))
        return x, laid_last(x) if self.lies_last else x

    def times(self, *, cold: bool = False) -> Times:
        """Return how long they take in each way; `cold`: with caches emptied before."""
        x, other = self.given()
        some = self.tensors[:MOST]

        def run(compute: Compute, x: Tensor) -> None:
            for each in some:
                compute(x, *each)

        before, after = (lambda: run(self.before, x)), (lambda: run(self.after, other))
        with torch.no_grad():
            if self.gain_together:
                found = time_pair(before, after, seconds=SECONDS_OF_A_KIND / 2, cold=cold)
            else:
                found = time_kind(before, after, least=LEAST_GAIN, cold=cold)
        own, packed = (found.seconds(name) / len(some) for name in ("before", "after"))
        return Times(found.ratio("before", "after"), own, packed)


@dataclass
class Gains:
    """What is known of kinds: how long they take, why they must not be packed, which are faster on transposed weights,
    and the errors, relative to the scale, of those that are not to be exact.
    """

    known: dict[Hashable, Times] = field(default_factory=dict[Hashable, Times])
    faults: dict[Hashable, str] = field(default_factory=dict[Hashable, str])
    transposed: set[Hashable] = field(default_factory=set[Hashable])
    errors: dict[Hashable, float] = field(default_factory=dict[Hashable, float])

    @property
    def seen(self) -> set[Hashable]:
        """Return the kinds that something is known of."""
        return {*self.known, *self.faults}

    def refusal(self, kind: Hashable, at: str, least: float = LEAST_GAIN) -> Refusal | None:
        """Return why a layer of a kind stays as it is: it would be wrong, or gain less than `least`."""
        if kind in self.faults:
            return Refusal(self.faults[kind], at, Cause.JUDGED_WRONG)
        slow = no_gain(self.known[kind].gain, least) if kind in self.known else ""
        return Refusal(slow, at, Cause.JUDGED_SLOWER) if slow else None

    def error(self, kinds: Collection[Hashable]) -> float | None:
        """Return the largest error of some kinds; None where it is not known of all, or there are none."""
        known = [self.errors[kind] for kind in kinds if kind in self.errors]
        return max(known) if kinds and len(known) == len(kinds) else None

    def look(self, kind: Hashable, lowerings: Mapping[str, Calls], *, allowed: float | None) -> dict[str, Calls]:
        """Check the layers of a kind; return the lowerings that err by at most `allowed`: none if not `PACKED`."""
        if fault := self._fault(kind, lowerings[PACKED], allowed):
            self.faults[kind] = fault
            return {}
        others = {lowering: calls for lowering, calls in lowerings.items() if lowering != PACKED}
        right = {lowering: calls for lowering, calls in others.items() if not self._fault(kind, calls, allowed)}
        return {PACKED: lowerings[PACKED], **right}

    def _fault(self, kind: Hashable, calls: Calls, allowed: float | None) -> str:
        x, other = calls.given()
        if allowed is None:
            return calls.check.fault(x, other)
        self.errors[kind] = error = calls.check.error(x, other)
        return over_budget(error, allowed)

    def take(self, kind: Hashable, times: Mapping[str, Times]) -> None:
        """Take the fastest way of computing a kind."""
        lowering = max(times, key=lambda lowering: times[lowering].gain.mid)
        self.known[kind] = times[lowering]
        if lowering == TRANSPOSED:
            self.transposed.add(kind)


# -- layers whose weights come from memory: all kinds are called in turn, as a forward calls them ------------------


Lowerings = Mapping[str, Calls]
"""Name -> a way of computing a kind; all of them have one way before."""


def times_interleaved(kinds: Mapping[Hashable, Lowerings]) -> dict[Hashable, dict[str, Times]]:
    """Return how long a layer takes in each lowering, all kinds called in turn: caches hold the weights of others."""
    layers = {kind: _calls(lowerings) for kind, lowerings in kinds.items()}
    names = list(dict.fromkeys(name for calls in layers.values() for name in calls))
    passes = {name: {kind: calls[name] for kind, calls in layers.items() if name in calls} for name in names}
    found = {kind: Timings() for kind in kinds}
    shuffling, start = random.Random(0), time.perf_counter()  # noqa: S311 - it hides no secret
    with torch.no_grad():
        for calls in passes.values():
            _seconds(calls)
        for count in range(_ROUNDS[1]):
            if count >= _ROUNDS[0] and time.perf_counter() - start > _SECONDS * len(kinds):
                break
            seconds = {name: _seconds(passes[name]) for name in shuffling.sample(names, len(names))}
            for kind, timings in found.items():
                timings.rounds.append({name: each[kind] for name, each in seconds.items() if kind in each})
    own = {kind: timings.seconds(_BEFORE) for kind, timings in found.items()}
    gains = {(kind, name): found[kind].ratio(_BEFORE, name) for kind, each in kinds.items() for name in each}
    times: dict[Hashable, dict[str, Times]] = {kind: {} for kind in kinds}
    for (kind, name), gain in gains.items():
        times[kind][name] = Times(gain, own[kind], own[kind] / gain.mid)
    return times


def _calls(lowerings: Lowerings) -> dict[str, _InTurn]:
    """Return the calls of some layers of a kind as they are, and in each lowering."""
    first = next(iter(lowerings.values()))
    ways = {_BEFORE: (first.before, first.given()[0])}
    ways |= {name: (calls.after, calls.given()[1]) for name, calls in lowerings.items()}
    some = first.tensors[:MOST]
    return {name: [partial(compute, x, *tensors) for tensors in some] for name, (compute, x) in ways.items()}


def _seconds(calls: Mapping[Hashable, _InTurn]) -> dict[Hashable, float]:
    """Call a layer of each kind in turn, then the next of each; return the seconds that one of each kind takes."""
    clock, spent = race_clock(), dict.fromkeys(calls, 0.0)
    for number in range(MOST):
        for kind, each in calls.items():
            if number < len(each):
                begin = clock()
                each[number]()
                spent[kind] += clock() - begin
    return {kind: seconds / len(calls[kind]) for kind, seconds in spent.items()}

"""Which layers gain from packing: each kind is checked and timed once, by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ...operators import laid_last
from ...passes.kinds import LEAST_GAIN, no_gain, over_budget
from ...passes.sites import Cause, Refusal
from ...passes.timing import SECONDS_OF_A_KIND, Interval, time_kind, time_pair

__all__ = ["MOST", "PACKED", "TRANSPOSED", "Calls", "Gains", "Times"]

MOST = 4
"""So many layers of a kind are called in turn: in use, weights do not wait in the caches either."""

PACKED, TRANSPOSED = "packed", "transposed"
"""The lowerings of a layer: on a packed weight, and at one row on a transposed one."""

Compute = Callable[..., object]


class _Check(Protocol):
    """Say how far off a packed layer is."""

    def fault(self, x: Tensor, laid: Tensor) -> str:
        """Return it in words, or "" where that is rounding."""
        ...

    def error(self, x: Tensor, laid: Tensor) -> float:
        """Return it, relative to the scale of the result."""
        ...


@dataclass(frozen=True)
class Times:
    """How long a layer takes by itself.

    Attributes:
        gain: how many times faster it is packed.
        own, packed: seconds, as it is and packed.
    """

    gain: Interval
    own: float
    packed: float


@dataclass(frozen=True)
class Calls:
    """Layers of one kind, in two ways of computing them.

    Attributes:
        shape: of what they are given.
        before, after: compute a layer, from what it is given and its tensors.
        tensors: those of each layer: the weight and bias, say.
        check: of one of them.
        lies_last: what the new way is given lies channels last in memory.
        gain_together: it matters little what they gain by themselves: they are timed for half as long.
    """

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
    """What was found out about kinds of layers.

    Attributes:
        known: how long they take.
        faults: why they must not be packed.
        transposed: those that are faster on transposed weights.
        errors: of those that are not to be exact, relative to the scale of their results.
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
        """Check the layers of a kind; return the lowerings that are right: none where `PACKED` is wrong.

        The others compute with the packed weight, too, where a call has more rows than one.

        Args:
            kind: of layers.
            lowerings: `PACKED`, and perhaps another.
            allowed: the error that they may make, relative to the scale of the result; None: they are to be exact.
        """
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

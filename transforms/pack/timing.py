"""Which layers gain from packing: each kind is checked and timed once, by itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ...operators import CHANNELS_LAST
from ...passes.timing import Interval, time_pair
from ...settings import Measure

__all__ = ["LEAST", "Calls", "Gains", "Times"]

LEAST = 1.01
"""What gains less by itself stays as it is; of the rest the whole model tells."""

_SECONDS = 0.04
"""How long a kind of layer is timed."""

_MOST = 4
"""So many layers of a kind are called in turn: in use, weights do not wait in the caches either."""

Compute = Callable[..., object]


class _Check(Protocol):
    """Say how far off a packed layer is, or "" where that is rounding."""

    def fault(self, x: Tensor, laid: Tensor) -> str: ...


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
    """

    shape: tuple[int, ...]
    before: Compute
    after: Compute
    tensors: Sequence[tuple[Tensor | None, ...]]
    check: _Check
    lies_last: bool = False

    def given(self) -> tuple[Tensor, Tensor]:
        """Return what the layers are given in each way."""
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(0))
        return x, x.contiguous(memory_format=CHANNELS_LAST[len(self.shape)]) if self.lies_last else x

    def times(self, x: Tensor, other: Tensor, *, cold: bool = False) -> Times:
        """Return how long they take in each way; `cold`: with caches emptied before."""
        some = self.tensors[:_MOST]

        def run(compute: Compute, x: Tensor) -> None:
            for each in some:
                compute(x, *each)

        before, after = (lambda: run(self.before, x)), (lambda: run(self.after, other))
        with torch.no_grad():
            found = time_pair(before, after, seconds=_SECONDS, cold=cold)
        own, packed = (found.seconds(name) / len(some) for name in ("before", "after"))
        return Times(found.ratio("before", "after"), own, packed)


@dataclass
class Gains:
    """What was found out about kinds of layers.

    Attributes:
        known: how long they take.
        faults: why they must not be packed.
    """

    known: dict[Hashable, Times] = field(default_factory=dict[Hashable, Times])
    faults: dict[Hashable, str] = field(default_factory=dict[Hashable, str])

    @property
    def seen(self) -> set[Hashable]:
        """Return the kinds that something is known of."""
        return {*self.known, *self.faults}

    def objection(self, kind: Hashable, least: float = LEAST) -> str:
        """Return why layers of a kind stay as they are: they are wrong, or gain less than `least`; else ""."""
        if kind in self.faults:
            return self.faults[kind]
        gain = self.known[kind].gain if kind in self.known else None
        if gain is None or gain.mid >= least:
            return ""
        return f"it would be no faster: {gain.mid:.3g}x ({gain.low:.3g} to {gain.high:.3g})"

    def look(self, kind: Hashable, calls: Calls, *, exact: bool, measuring: Measure) -> None:
        """Check the layers of a kind, where they are to be exact, and time them where that is wanted."""
        x, other = calls.given()
        fault = calls.check.fault(x, other) if exact else ""
        if fault:
            self.faults[kind] = fault
        elif measuring:
            self.known[kind] = calls.times(x, other, cold=measuring.is_cold)

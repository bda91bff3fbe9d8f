"""Which layers gain from packing: each kind is checked and timed once, by itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...passes.timing import Interval, time_candidates
from .checking import Check

__all__ = ["Calls", "Gains"]

_SECONDS = 0.04
"""How long a kind of layer is timed."""

_MOST = 4
"""So many layers of a kind are called in turn: in use, weights do not wait in the caches either."""

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions."""

Compute = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Calls:
    """Layers of one kind, in two ways of computing them.

    Attributes:
        shape: of what they are given.
        before, after: compute a layer, from what it is given, its weight and its bias.
        tensors: the weight and bias of each layer.
        check: of one of them.
        lies_last: what the new way is given lies channels last in memory.
    """

    shape: tuple[int, ...]
    before: Compute
    after: Compute
    tensors: Sequence[tuple[Tensor, Tensor | None]]
    check: Check
    lies_last: bool = False

    def given(self) -> tuple[Tensor, Tensor]:
        """Return what the layers are given in each way."""
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(0))
        return x, x.contiguous(memory_format=_LAST[len(self.shape)]) if self.lies_last else x

    def gain(self, x: Tensor, other: Tensor, *, cold: bool) -> Interval:
        """Return how many times faster they are computed in the new way; `cold`: with caches emptied before."""
        some = self.tensors[:_MOST]

        def run(compute: Compute, x: Tensor) -> None:
            for weight, bias in some:
                compute(x, weight, bias)

        runs = {"before": lambda: run(self.before, x), "after": lambda: run(self.after, other)}
        with torch.no_grad():
            timings = time_candidates(runs, seconds=_SECONDS, least_rounds=6, limit=2 * _SECONDS, cold=cold)
        return timings.ratio("before", "after")


@dataclass
class Gains:
    """What was found out about kinds of layers.

    Attributes:
        known: how many times faster they are.
        faults: why they must not be packed.
    """

    known: dict[Hashable, Interval] = field(default_factory=dict[Hashable, Interval])
    faults: dict[Hashable, str] = field(default_factory=dict[Hashable, str])

    def look(self, kind: Hashable, calls: Calls, *, exact: bool, timed: bool, cold: bool = False) -> None:
        """Check the layers of a kind, where they are to be exact, and time them; `cold`: with caches emptied before."""
        x, other = calls.given()
        fault = calls.check.fault(x, other) if exact else ""
        if fault:
            self.faults[kind] = fault
        elif timed:
            self.known[kind] = calls.gain(x, other, cold=cold)

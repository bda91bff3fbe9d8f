"""Which layers gain from packing: each kind is checked and timed once, by itself."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ...operators import laid_last
from ...passes.kinds import LEAST_GAIN, Judgement, figures_of, over_budget
from ...passes.sites import Reason
from ...passes.timing import Timings, race_clock, timing_figures, within_left

__all__ = [
    "MOST", "PACKED", "TRANSPOSED", "Calls", "Lowerings", "compared", "fastest", "figures_interleaved", "largest_error",
]  # fmt: skip

MOST = 4
"""So many layers of a kind are called in turn: in use, weights do not wait in the caches either."""

PACKED, TRANSPOSED = "packed", "transposed"
"""The lowerings of a layer: on a packed weight, and at one row on a transposed one."""

_ROUNDS = (8, 30)
"""So many are taken at least, and at most."""

_SECONDS = 0.05
"""How long each kind is timed."""

_OF_LEFT = 0.5
"""All kinds that are called in turn take no more than this part of the time that is left for sites."""

_BEFORE = "before"

_InTurn = Sequence[Callable[[], object]]
"""One of each layer of a kind."""

Compute = Callable[..., object]
Figures = Mapping[str, Any]
"""As plans have them: times of one layer in both ways, and their ratio."""


class _Check(Protocol):
    """Say in what a packed layer is wrong, None where it only rounds; or how far off it is, relative to the scale."""

    def reason_against(self, x: Tensor, laid: Tensor) -> Reason | None: ...

    def error(self, x: Tensor, laid: Tensor) -> float: ...


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

    def judged(self, allowed: float | None) -> Judgement:
        """Compare the first of them: it may err by `allowed`, or for None by what rounding makes."""
        x, other = self.given()
        if allowed is None:
            return Judgement(reason=self.check.reason_against(x, other), lowering=PACKED)
        error = self.check.error(x, other)
        return Judgement(error, reason=over_budget(error, allowed), lowering=PACKED)

    def in_turn(self) -> tuple[_InTurn, _InTurn]:
        """Return the calls of some of them in each way."""
        ways = zip((self.before, self.after), self.given(), strict=True)
        before, after = ([partial(way, x, *each) for each in self.tensors[:MOST]] for way, x in ways)
        return before, after

    def figures(self, *, cold: bool = False) -> Figures:
        """Return how long one of them takes in each way, and the ratio; `cold`: with caches emptied before."""
        return figures_of(*self.in_turn(), cold=cold, least=None if self.gain_together else LEAST_GAIN)


Lowerings = Mapping[str, Calls]
"""Name -> a way of computing a kind; all of them have one way before."""


def compared(lowerings: Lowerings, *, allowed: float | None) -> tuple[Judgement, Lowerings]:
    """Return what is known of a kind, and the lowerings that err by at most `allowed`: none if not `PACKED`."""
    packed = lowerings[PACKED].judged(allowed)
    if packed.reason is not None:
        return packed, {}
    others = {name: calls for name, calls in lowerings.items() if name != PACKED}
    right = {name: calls for name, calls in others.items() if calls.judged(allowed).reason is None}
    return packed, {PACKED: lowerings[PACKED], **right}


def fastest(known: Judgement, figures: Mapping[str, Figures]) -> Judgement:
    """Return what is known of a kind with the figures of its fastest lowering."""
    lowering = max(figures, key=lambda lowering: figures[lowering]["speedup"])
    return replace(known, figures=figures[lowering], lowering=lowering)


def largest_error(known: Iterable[Judgement]) -> float | None:
    """Return the largest error of some kinds; None where it is not known of all, or there are none."""
    errors = [each.error for each in known]
    return None if None in errors else max((error for error in errors if error is not None), default=None)


# -- layers whose weights come from memory: all kinds are called in turn, as a forward calls them ------------------


def figures_interleaved(kinds: Mapping[Hashable, Lowerings]) -> dict[Hashable, dict[str, Figures]]:
    """Return how long a layer takes in each lowering, all kinds called in turn: caches hold the weights of others."""
    layers = {kind: _calls(lowerings) for kind, lowerings in kinds.items()}
    names = list(dict.fromkeys(name for calls in layers.values() for name in calls))
    passes = {name: {kind: calls[name] for kind, calls in layers.items() if name in calls} for name in names}
    found = {kind: Timings() for kind in kinds}
    seconds = within_left(_SECONDS * len(kinds), _OF_LEFT)
    shuffling, start = random.Random(0), time.perf_counter()  # noqa: S311 - it hides no secret
    with torch.no_grad():
        for calls in passes.values():
            _seconds(calls)
        for count in range(_ROUNDS[1]):
            if count >= _ROUNDS[0] and time.perf_counter() - start > seconds:
                break
            took = {name: _seconds(passes[name]) for name in shuffling.sample(names, len(names))}
            for kind, timings in found.items():
                timings.rounds.append({name: each[kind] for name, each in took.items() if kind in each})
    return {kind: {name: timing_figures(found[kind], name) for name in each} for kind, each in kinds.items()}


def _calls(lowerings: Lowerings) -> dict[str, _InTurn]:
    """Return the calls of some layers of a kind as they are, and in each lowering."""
    ways = {name: calls.in_turn() for name, calls in lowerings.items()}
    return {_BEFORE: next(iter(ways.values()))[0], **{name: after for name, (_, after) in ways.items()}}


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

"""How long layers take whose weights come from memory: all kinds are called in turn, as a forward calls them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

import torch

from ...passes.timing import Timings, race_clock
from .timing import MOST, Calls, Times

__all__ = ["times_interleaved"]

_ROUNDS = (8, 30)
"""So many are taken at least, and at most."""

_SECONDS = 0.05
"""How long each kind is timed."""

Lowerings = Mapping[str, Calls]
"""Name -> a way of computing a kind; all of them have one way before."""

_BEFORE = "before"

_LayerCalls = Sequence[Callable[[], object]]
"""One of each layer of a kind."""


def times_interleaved(kinds: Mapping[Hashable, Lowerings]) -> dict[Hashable, dict[str, Times]]:
    """Return how long one layer of each kind takes in each lowering that is known of it.

    A kind that is called by itself finds its weights in the caches; in the model those of others have taken their
    place. Emptying the caches by writing, as for `measure="cold"`, would slow down the reading.
    """
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
    return {kind: {name: _times(found[kind], name) for name in lowerings} for kind, lowerings in kinds.items()}


def _times(timings: Timings, lowering: str) -> Times:
    own, gain = timings.seconds(_BEFORE), timings.ratio(_BEFORE, lowering)
    return Times(gain, own, own / gain.mid)


def _calls(lowerings: Lowerings) -> dict[str, _LayerCalls]:
    """Return the calls of some layers of a kind as they are, and in each lowering."""
    first = next(iter(lowerings.values()))
    ways = {_BEFORE: (first.before, first.given()[0])}
    ways |= {name: (calls.after, calls.given()[1]) for name, calls in lowerings.items()}
    some = first.tensors[:MOST]
    return {name: [partial(compute, x, *tensors) for tensors in some] for name, (compute, x) in ways.items()}


def _seconds(calls: Mapping[Hashable, _LayerCalls]) -> dict[Hashable, float]:
    """Call a layer of each kind in turn, then the next of each; return the seconds that one of each kind takes."""
    clock, spent = race_clock(), dict.fromkeys(calls, 0.0)
    for number in range(MOST):
        for kind, each in calls.items():
            if number < len(each):
                begin = clock()
                each[number]()
                spent[kind] += clock() - begin
    return {kind: seconds / len(calls[kind]) for kind, seconds in spent.items()}

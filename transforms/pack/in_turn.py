"""How long layers take whose weights come from memory: all kinds are called in turn, as a forward calls them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...passes.timing import Timings
from .timing import MOST, Calls, Times

__all__ = ["times_in_turn"]

_ROUNDS = (8, 30)
"""So many are taken at least, and at most."""

_SECONDS = 0.05
"""How long each kind is timed."""

Forms = Mapping[str, Calls]
"""Name -> a way of computing a kind; all of them have one way before."""

_BEFORE = "before"


def times_in_turn(kinds: Mapping[Hashable, Forms]) -> dict[Hashable, dict[str, Times]]:
    """Return how long kinds of layers take in each way that they are known in.

    A kind that is called by itself finds its weights in the caches; in the model those of others have taken their
    place. Emptying the caches by writing, as for `measure="cold"`, would slow down the reading.
    """
    found = {kind: Timings() for kind in kinds}
    forms = list(dict.fromkeys(itertools.chain((_BEFORE,), *kinds.values())))
    shuffling, start = random.Random(0), time.perf_counter()  # noqa: S311 - it hides no secret
    with torch.no_grad():
        for form in forms:
            _pass(kinds, form)
        for count in range(_ROUNDS[1]):
            if count >= _ROUNDS[0] and time.perf_counter() - start > _SECONDS * len(kinds):
                break
            seconds = {form: _pass(kinds, form) for form in shuffling.sample(forms, len(forms))}
            for kind, timings in found.items():
                timings.rounds.append({form: each[kind] for form, each in seconds.items() if kind in each})
    return {kind: dict(_times(found[kind], forms)) for kind, forms in kinds.items()}


def _times(timings: Timings, forms: Forms) -> Iterator[tuple[str, Times]]:
    own = timings.seconds(_BEFORE)
    for form in forms:
        gain = timings.ratio(_BEFORE, form)
        yield form, Times(gain, own, own / gain.mid)


def _pass(kinds: Mapping[Hashable, Forms], form: str) -> dict[Hashable, float]:
    """Call some layers of each kind in turn; return the seconds that each kind took."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    spent: dict[Hashable, float] = {}
    for kind, compute, x, tensors in _in_turn(kinds, form):
        begin = clock()
        compute(x, *tensors)
        spent[kind] = spent.get(kind, 0.0) + clock() - begin
    return spent


def _in_turn(
    kinds: Mapping[Hashable, Forms], form: str
) -> Iterator[tuple[Hashable, Callable[..., object], Tensor, Sequence[Tensor | None]]]:
    for number in range(MOST):
        for kind, forms in kinds.items():
            calls = forms.get(form, next(iter(forms.values())) if form == _BEFORE else None)
            if calls is not None and number < len(calls.tensors):
                compute = calls.before if form == _BEFORE else calls.after
                yield kind, compute, calls.given()[0], calls.tensors[number]

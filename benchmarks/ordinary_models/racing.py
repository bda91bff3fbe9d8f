"""Time all columns of a row in turns, in one process: only so can a few percent between two of them be told."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxopt.collection import collection_paused
from fxopt.passes.timing import Timings

from .cases import CASES, Case
from .columns import COLUMNS, RACES, Subject, imported
from .measuring import reference, relative_error

__all__ = ["in_turns", "raced"]

_SAMPLE_SECONDS = 1e-3
"""Calls are repeated until a sample takes so long."""

_CLOCKS: Mapping[str, Callable[[], float]] = {"processor": time.process_time, "wall": time.perf_counter}
Sample = dict[str, float]


@torch.no_grad()
def raced(name: str, precision: str, columns: Sequence[str], threads: int, pairs: int) -> dict[str, Any]:
    """Return how long each column takes, and how many times as fast the first one is, by two clocks.

    Args:
        name: of the row.
        precision: which race.
        columns: that take part, if they are in this race.
        threads: how many there are.
        pairs: how many rounds are timed, each of one sample of every column.
    """
    calls, failed = _prepared(CASES[name], [each for each in RACES[precision] if each in columns], threads)
    own, *others = RACES[precision]
    if own not in calls or len(calls) < 2:
        return {"failed": failed.get(own, "no other column is there"), "columns": failed}
    timed, expected = in_turns(calls, pairs), reference(*CASES[name].built())[1]
    errors = {each: relative_error([call()], [expected]) for each, call in calls.items()}
    cell: dict[str, Any] = {"rounds": pairs, "failed_columns": failed, "errors": errors}
    cell["budget"] = CASES[name].budget(own)
    for clock, timings in timed.items():
        ratios = {other: timings.ratio(other, own) for other in others if other in calls}
        cell[clock] = {
            "ms": {each: float(f"{timings.seconds(each) * 1e3:.4g}") for each in calls},
            "over": {other: [round(v, 3) for v in (r.low, r.mid, r.high)] for other, r in ratios.items()},
        }
    return cell


def _prepared(
    case: Case, columns: Sequence[str], threads: int
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Return what to call for each column, each with a network of its own, and why others cannot be called."""
    calls: dict[str, Callable[[], Tensor]] = {}
    failed: dict[str, str] = {}
    for column in columns:
        try:
            imported(column)
            call = COLUMNS[column](Subject(case, *case.built(), threads)).call
            call()
            calls[column] = call
        except Exception as error:
            failed[column] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]
    return calls, failed


def in_turns(calls: Mapping[str, Callable[[], object]], pairs: int) -> dict[str, Timings]:
    """Return samples by the clocks "processor" and "wall", of so many rounds, each in another order.

    Before each sample there is a call that is not timed, for another one had the caches.
    """
    often = {name: _repeats(call) for name, call in calls.items()}
    timed = {clock: Timings() for clock in _CLOCKS}
    shuffling = random.Random(0)
    with collection_paused():
        for _ in range(pairs):
            samples = {name: _sample(calls[name], often[name]) for name in shuffling.sample(list(calls), len(calls))}
            for clock, timings in timed.items():
                timings.rounds.append({name: sample[clock] for name, sample in samples.items()})
    return timed


def _repeats(call: Callable[[], object]) -> int:
    seconds = min(_sample(call, 1)["wall"] for _ in range(3))
    return max(1, math.ceil(_SAMPLE_SECONDS / max(seconds, 1e-9)))


def _sample(call: Callable[[], object], often: int) -> Sample:
    call()
    starts = {name: clock() for name, clock in _CLOCKS.items()}
    for _ in range(often):
        call()
    return {name: (clock() - starts[name]) / often for name, clock in _CLOCKS.items()}

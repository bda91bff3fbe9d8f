"""Choose what is run again: the cheapest schedules for less and less memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .problem import Problem, Recomputed, Region, Schedule

__all__ = ["front", "frontier"]

_LABELS = 48
"""So many ways of reaching a place, of different memory and cost, are followed further."""

_HELD_SETS = 12
"""So many sets of activations that are held across a place are told apart."""

_RUNGS = 24
"""So many amounts of memory, at the most, are solved for between that of the plain model and the least."""

_EXACT = 64
"""Up to so many regions to choose from, every schedule on the frontier is looked for."""

_BISECTIONS = 5

_Held = frozenset[int]
_Array = np.ndarray[Any, np.dtype[np.float64]]


def frontier(problem: Problem) -> list[Schedule]:
    """Return schedules of less and less memory, each the cheapest known for its own; the plain model comes first.

    Each is the cheapest for a limit just below the memory of the one before, or a rung further down where there are
    many. It depends on the problem alone, so of two budgets the smaller never gets more memory.
    """
    solver = _Solver(problem)
    found = [problem.schedule(())]
    rung = 0 if len(problem.spans) <= _EXACT else found[0].peak // _RUNGS
    limit, too_small = found[0].peak - 1, -1
    while True:
        schedule = solver.solve(limit)
        if schedule is None:
            too_small = limit
            break
        found.append(schedule)
        limit = min(schedule.peak - 1, limit - rung)
    for _ in range(_BISECTIONS if rung else 0):
        schedule = solver.solve((too_small + found[-1].peak) // 2)
        if schedule is None:
            too_small = (too_small + found[-1].peak) // 2
        else:
            found.append(schedule)
    return front(found)


def front(found: Sequence[Schedule]) -> list[Schedule]:
    """Return the schedules that no other beats in both memory and cost, the largest first."""
    kept: list[Schedule] = []
    for schedule in sorted(found, key=lambda each: (each.operations, each.peak, each.live)):
        if not kept or schedule.peak < kept[-1].peak:
            kept.append(schedule)
    return kept


@dataclass
class _Labels:
    """Ways of reaching one place with the same activations held.

    Attributes:
        held: bytes that are held there.
        cost: of what will be run again so far.
        move: number of the move that led here.
        before: number of the label that the move started from.
    """

    held: _Array
    cost: _Array
    move: _Array
    before: _Array

    def thinned(self) -> _Labels:
        """Return those that no other beats, and of many those that lie furthest apart."""
        order = np.lexsort((self.cost, self.held))
        cost = self.cost[order]
        better = np.ones(len(order), dtype=bool)
        better[1:] = cost[1:] < np.minimum.accumulate(cost)[:-1]
        kept = order[better]
        if len(kept) > _LABELS:
            kept = kept[np.unique(np.linspace(0, len(kept) - 1, _LABELS).round().astype(int))]
        return _Labels(self.held[kept], self.cost[kept], self.move[kept], self.before[kept])


@dataclass(frozen=True)
class _Move:
    """From one place and what is held there to a later one; `region` is None where a step just runs."""

    place: int
    held: _Held
    region: Region | None


@dataclass
class _Solver:
    """Dynamic programming over the places between steps.

    A label is what was held and paid for on the way to a place. Which of the activations that cross the place are held
    already makes a difference for what follows, so labels are kept apart by that. On a chain one activation crosses
    each place, and all are looked at; where many cross, the cheapest few sets are.
    """

    problem: Problem
    _moves_from: dict[int, list[tuple[Region, Recomputed]]] = field(init=False)
    _saves: list[_Held] = field(init=False)

    def __post_init__(self) -> None:
        self._moves_from = defaultdict(list)
        for region in dict.fromkeys(self.problem.spans):
            self._moves_from[region.start].append((region, self.problem.recomputed(region)))
        sizes = self.problem.sizes
        self._saves = [frozenset(a for a in step.saves if a in sizes) for step in self.problem.steps]

    def solve(self, limit: int) -> Schedule | None:
        """Return the cheapest schedule that holds no more than `limit` bytes at once, or None."""
        moves: list[_Move] = [_Move(-1, frozenset(), None)]
        zero = np.zeros(1)
        arrived: list[dict[_Held, list[_Labels]]] = [defaultdict(list) for _ in range(len(self.problem.steps) + 1)]
        arrived[0][frozenset()].append(_Labels(zero, zero, zero, zero))
        settled: list[dict[_Held, _Labels]] = []
        for place, ways in enumerate(arrived):
            labels = _settled(ways)
            settled.append(labels)
            if place < len(self.problem.steps):
                for held, from_here in labels.items():
                    self._leave(place, held, from_here, limit, moves, arrived)
        if not settled[-1]:
            return None
        return self.problem.schedule(_path(settled, moves))

    def _leave(
        self,
        place: int,
        held: _Held,
        labels: _Labels,
        limit: int,
        moves: list[_Move],
        arrived: Sequence[dict[_Held, list[_Labels]]],
    ) -> None:
        """Make every move from a place."""
        step = Recomputed(self._saves[place], 0, 0.0)
        for region, again in ((None, step), *self._moves_from[place]):
            stop = place + 1 if region is None else region.stop
            added = self.problem.bytes_of(again.keeps - held)
            fits = labels.held <= limit - added - again.restores
            if not fits.any():
                continue
            before = np.flatnonzero(fits)
            moved = _Labels(
                labels.held[before] + added,
                labels.cost[before] + again.operations,
                np.full(len(before), float(len(moves))),
                before.astype(float),
            )
            arrived[stop][(held | again.keeps) & self.problem.crossing[stop]].append(moved)
            moves.append(_Move(place, held, region))


def _settled(ways: dict[_Held, list[_Labels]]) -> dict[_Held, _Labels]:
    """Return the labels of a place worth following."""
    fields = ("held", "cost", "move", "before")
    found = {
        held: _Labels(*(np.concatenate([getattr(each, name) for each in labels]) for name in fields)).thinned()
        for held, labels in ways.items()
    }
    if len(found) <= _HELD_SETS:
        return found
    best = sorted(found, key=lambda held: (float(found[held].cost.min()), float(found[held].held.min()), sorted(held)))
    least = sorted(found, key=lambda held: (float(found[held].held.min()), sorted(held)))
    kept = dict.fromkeys((*best[: _HELD_SETS // 2], *least[: _HELD_SETS // 2]))
    return {held: found[held] for held in kept}


def _path(settled: Sequence[dict[_Held, _Labels]], moves: Sequence[_Move]) -> list[Region]:
    """Return the regions on the cheapest way to the end; of equally cheap ones, that which holds least."""
    place = len(settled) - 1
    ends = [(float(labels.cost[-1]), float(labels.held[-1]), sorted(held)) for held, labels in settled[-1].items()]
    held = frozenset(min(ends)[2])
    number = len(settled[place][held].held) - 1
    regions: list[Region] = []
    while place > 0:
        labels = settled[place][held]
        move = moves[int(labels.move[number])]
        number = int(labels.before[number])
        place, held = move.place, move.held
        if move.region is not None:
            regions.append(move.region)
    return regions

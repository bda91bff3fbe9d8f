"""Choose what is run again: the cheapest schedules for less and less memory."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .problem import Problem, Recomputed, Region, Schedule

__all__ = ["front", "frontier"]

_LABELS = 48
"""So many ways of reaching a place, of different memory and cost, are followed further."""

_HELD_SETS = 12
"""So many sets of activations that are held across a place are told apart."""

_RUNG = 16
"""Between the plain model and the least, each amount of memory that is solved for is less by this part of it."""

_EXACT = 64
"""Up to so many regions to choose from, every schedule on the frontier is looked for."""

_Held = frozenset[int]


def frontier(problem: Problem) -> list[Schedule]:
    """Return schedules of less and less memory, each the cheapest known for its own; the plain model comes first."""
    solver, plain = _Solver(problem), problem.schedule(())
    if len(problem.spans) <= _EXACT:
        return front([plain, *_every(solver, plain.peak)])
    smallest = _smallest(solver, plain.peak)
    return front([plain, *smallest, *_ladder(solver, smallest, plain.peak)])


def _every(solver: _Solver, most: int) -> Iterator[Schedule]:
    """Yield the cheapest schedule for a limit just below the memory of the one before."""
    found = solver.solve(most - 1)
    while found is not None:
        yield found
        found = solver.solve(found.peak - 1)


def _smallest(solver: _Solver, most: int) -> list[Schedule]:
    """Return schedules on the way to the least memory, found to within a rung: its last bytes are dear."""
    found: list[Schedule] = []
    too_small, enough = -1, most
    while enough - too_small > max(enough // _RUNG, 1):
        limit = max((too_small + enough) // 2, enough // 4)
        schedule = solver.solve(limit)
        if schedule is None:
            too_small = limit
        else:
            found.append(schedule)
            enough = schedule.peak
    return found


def _ladder(solver: _Solver, smallest: Sequence[Schedule], most: int) -> Iterator[Schedule]:
    """Yield the cheapest schedule for larger and larger limits; what it costs is known not to be more than before."""
    if not smallest:
        return
    best = smallest[-1]
    limit = best.peak + best.peak // _RUNG
    while limit < most:
        best = solver.solve(limit, best.operations * (1 + 1e-9)) or best
        yield best
        limit += max(limit // _RUNG, 1)


def front(found: Sequence[Schedule]) -> list[Schedule]:
    """Return the schedules that no other beats in both memory and cost, the largest first."""
    kept: list[Schedule] = []
    for schedule in sorted(found, key=lambda each: (each.operations, each.peak, each.live)):
        if not kept or schedule.peak < kept[-1].peak:
            kept.append(schedule)
    return kept


_Label = tuple[int, float, int, int]
"""A way of reaching a place: bytes held there, cost so far, number of the move that led here, and of its label before.
"""


@dataclass(frozen=True)
class _Move:
    """From one place, and what is held there, to a later one."""

    place: int  # where it starts
    held: _Held
    region: Region | None  # what is run again; None where a step just runs
    stop: int  # where it ends
    then: _Held
    added: int  # bytes that are held in addition
    needed: int  # bytes that must be free at its start
    operations: float


class _Solver:
    """Dynamic programming over the places between steps; labels say what was held and paid on the way to one."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._regions: dict[int, list[tuple[Region, Recomputed]]] = defaultdict(list)
        for region in dict.fromkeys(problem.spans):
            self._regions[region.start].append((region, problem.recomputed(region)))
        self._moves: list[_Move] = []
        self._from: dict[tuple[int, _Held], range] = {}

    def solve(self, limit: int, dearest: float = math.inf) -> Schedule | None:
        """Return the cheapest schedule that holds no more than `limit` bytes at once and costs no more, or None."""
        end, most = len(self._problem.steps), limit + self._problem.room
        arrived: list[dict[_Held, list[_Label]]] = [defaultdict(list) for _ in range(end + 1)]
        arrived[0][frozenset()].append((0, 0.0, -1, -1))
        for place in range(end):
            arrived[place] = _settled(arrived[place])
            for held, labels in arrived[place].items():
                sizes = [label[0] for label in labels]
                for number in self._moves_from(place, held):
                    move = self._moves[number]
                    fit = bisect_right(sizes, min(most - move.needed, limit - move.added))
                    added, dearer = move.added, move.operations
                    arrived[move.stop][move.then] += [
                        (size + added, cost + dearer, number, index)
                        for index, (size, cost, _, _) in enumerate(labels[:fit])
                        if cost + dearer <= dearest
                    ]
        arrived[end] = _settled(arrived[end])
        return self._problem.schedule(self._path(arrived)) if arrived[end] else None

    def _moves_from(self, place: int, held: _Held) -> range:
        """Return the numbers of all moves from a place; they are the same for every limit."""
        known = self._from.get((place, held))
        if known is not None:
            return known
        first = len(self._moves)
        for region, again in ((None, self._problem.stepped(place)), *self._regions[place]):
            stop = place + 1 if region is None else region.stop
            then = (held | again.keeps) & self._problem.crossing[stop]
            added = self._problem.bytes_of(again.keeps - held)
            needed = added + again.needs
            self._moves.append(_Move(place, held, region, stop, then, added, needed, again.operations))
        known = self._from[place, held] = range(first, len(self._moves))
        return known

    def _path(self, arrived: Sequence[Mapping[_Held, Sequence[_Label]]]) -> list[Region]:
        """Return the regions on the cheapest way to the end; of equally cheap ones, that which holds least."""
        (label,) = (labels[-1] for labels in arrived[-1].values())  # nothing crosses the end
        regions: list[Region] = []
        while label[2] >= 0:
            move = self._moves[label[2]]
            if move.region is not None:
                regions.append(move.region)
            label = arrived[move.place][move.held][label[3]]
        return regions


def _settled(ways: Mapping[_Held, list[_Label]]) -> dict[_Held, list[_Label]]:
    """Return the labels of a place worth following."""
    found = {held: _thinned(labels) for held, labels in ways.items() if labels}
    if len(found) <= _HELD_SETS:
        return found
    cheap = sorted(found, key=lambda held: (found[held][-1][1], found[held][-1][0], sorted(held)))
    small = sorted(found, key=lambda held: (found[held][0][0], found[held][0][1], sorted(held)))
    return {held: found[held] for held in dict.fromkeys((*cheap[: _HELD_SETS // 2], *small[: _HELD_SETS // 2]))}


def _thinned(labels: list[_Label]) -> list[_Label]:
    """Return the labels that no other beats, the smallest first, and of many those that lie furthest apart."""
    labels.sort()
    kept: list[_Label] = []
    for label in labels:
        if not kept or label[1] < kept[-1][1]:
            kept.append(label)
    if len(kept) <= _LABELS:
        return kept
    return [kept[round(number * (len(kept) - 1) / (_LABELS - 1))] for number in range(_LABELS)]

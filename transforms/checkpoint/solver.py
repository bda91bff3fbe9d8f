"""Choose what is run again: the cheapest schedules for less and less memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


_Label = tuple[int, float, int, int]
"""A way of reaching a place: bytes held there, cost so far, number of the move that led here, and of its label before.
"""


@dataclass(frozen=True)
class _Move:
    """From one place, and what is held there, to a later one.

    Attributes:
        place, held: where it starts.
        region: what is run again; None where a step just runs.
        stop, then: where it ends.
        added: bytes that are held in addition.
        needed: bytes that must be free at its start.
        operations: what it costs.
    """

    place: int
    held: _Held
    region: Region | None
    stop: int
    then: _Held
    added: int
    needed: int
    operations: float


class _Solver:
    """Dynamic programming over the places between steps.

    A label is what was held and paid for on the way to a place. Which of the activations that cross the place are held
    already makes a difference for what follows, so labels are kept apart by that. On a chain one activation crosses
    each place, and all are looked at; where many cross, the cheapest few sets are.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._regions: dict[int, list[tuple[Region, Recomputed]]] = defaultdict(list)
        for region in dict.fromkeys(problem.spans):
            self._regions[region.start].append((region, problem.recomputed(region)))
        self._moves: list[_Move] = []
        self._from: dict[tuple[int, _Held], range] = {}

    def solve(self, limit: int) -> Schedule | None:
        """Return the cheapest schedule that holds no more than `limit` bytes at once, or None."""
        end = len(self._problem.steps)
        arrived: list[dict[_Held, list[_Label]]] = [defaultdict(list) for _ in range(end + 1)]
        arrived[0][frozenset()].append((0, 0.0, -1, -1))
        for place in range(end):
            arrived[place] = _settled(arrived[place])
            for held, labels in arrived[place].items():
                for number in self._moves_from(place, held):
                    move = self._moves[number]
                    room, there = limit - move.needed, arrived[move.stop][move.then]
                    for index, (size, cost, _, _) in enumerate(labels):
                        if size > room:
                            break
                        there.append((size + move.added, cost + move.operations, number, index))
        arrived[end] = _settled(arrived[end])
        return self._problem.schedule(self._path(arrived)) if arrived[end] else None

    def _moves_from(self, place: int, held: _Held) -> range:
        """Return the numbers of all moves from a place; they are the same for every limit."""
        known = self._from.get((place, held))
        if known is not None:
            return known
        step = frozenset(a for a in self._problem.steps[place].saves if a in self._problem.sizes)
        first = len(self._moves)
        for region, again in ((None, Recomputed(step, 0, 0.0)), *self._regions[place]):
            stop = place + 1 if region is None else region.stop
            then = (held | again.keeps) & self._problem.crossing[stop]
            added = self._problem.bytes_of(again.keeps - held)
            needed = added + again.restores
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

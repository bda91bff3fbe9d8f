"""Choose what is run again: the cheapest schedules for less and less memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .problem import Problem, Recomputed, Region, Schedule

__all__ = ["front", "frontier"]

_LABELS = 48
"""So many ways of reaching a place, of different memory and cost, are followed further."""

_HELD_SETS = 12
"""So many sets of activations that are held across a place are told apart."""

_RUNG, _WIDE_RUNG, _MANY = 16, 8, 1000
"""From a budget down to its half, each limit that is solved for is less by this part of it; by the second where there
are more regions to choose from than the third, for each solution takes a second then. The least is found to within it.
"""

_EXACT = 64
"""Up to so many regions to choose from, every schedule on the frontier is looked for."""

_ROUNDED = 1 + 1e-9
"""Sums of costs differ by at most this factor where they are added in another order."""

_Held = frozenset[int]
_NOTHING: _Held = frozenset()


def frontier(problem: Problem, most: float) -> list[Schedule]:
    """Return schedules of less and less memory, each the cheapest known for its own.

    `most`: of so much memory or less, one is enough: the cheapest, or the smallest where none fits.
    """
    solver, plain = _Solver(problem), problem.schedule(())
    if len(problem.spans) <= _EXACT:
        found = [plain]
        while (schedule := solver.solve(found[-1].peak - 1)) is not None:
            found.append(schedule)
        return front(found)
    if fitting := _fitting(solver, plain, most):
        return front(fitting)
    return front([plain, *_smallest(solver, plain.peak)])


def _fitting(solver: _Solver, plain: Schedule, most: float) -> list[Schedule]:
    """Return schedules that fit, for limits from half of `most` up to it."""
    if plain.peak <= most:
        return [plain]
    limits = [int(most)]
    while limits[-1] > most / 2:
        limits.append(limits[-1] - max(limits[-1] // solver.rung, 1))
    found, dearest = list[Schedule](), math.inf
    for limit in reversed(limits):
        schedule = solver.solve(limit, dearest)
        if schedule is not None:
            found.append(schedule)
            dearest = schedule.operations * _ROUNDED
    return found


def _smallest(solver: _Solver, most: int) -> list[Schedule]:
    """Return schedules on the way to the least memory, found to within a rung: its last bytes are dear."""
    found: list[Schedule] = []
    too_small, enough = -1, most
    while enough - too_small > max(enough // solver.rung, 1):
        limit = max((too_small + enough) // 2, enough // 4)
        schedule = solver.solve(limit)
        if schedule is None:
            too_small = limit
        else:
            found.append(schedule)
            enough = schedule.peak
    return found


def front(found: Sequence[Schedule]) -> list[Schedule]:
    """Return the schedules that no other beats in both memory and cost, the largest first."""
    kept: list[Schedule] = []
    for schedule in sorted(found, key=lambda each: (each.operations, each.peak, each.live)):
        if not kept or schedule.peak < kept[-1].peak:
            kept.append(schedule)
    return kept


_Numbers = NDArray[np.int64]
_Costs = NDArray[np.float64]


class _Table:
    """Rows of three whole numbers and a cost, one after another."""

    def __init__(self) -> None:
        self.count = 0
        self.numbers: _Numbers = np.empty((3, 1024), np.int64)
        self.costs: _Costs = np.empty(1024)

    def add(self, first: _Numbers, second: _Numbers, third: _Numbers, costs: _Costs) -> slice:
        """Append rows, and return where they are."""
        start, self.count = self.count, self.count + len(costs)
        if self.count > len(self.costs):
            self.numbers = np.concatenate([self.numbers, np.empty((3, self.count), np.int64)], 1)
            self.costs = np.concatenate([self.costs, np.empty(self.count)])
        new = slice(start, self.count)
        self.numbers[:, new] = first, second, third
        self.costs[new] = costs
        return new


_SIZE, _MOVE, _BEFORE = range(3)
"""The numbers of a way to a place: bytes held there, the move that led there, and the way before that."""

_ADDED, _NEEDED, _TARGET = range(3)
"""The numbers of a move: bytes that are held in addition, bytes that must be free, and what is held at its end."""

_Arrival = tuple[_Numbers, _Numbers, _Numbers]
"""Numbers of moves to one place, each with the neighbouring ways that it follows: from which one, to before which."""


class _Solver:
    """Dynamic programming over the places between steps; labels say what was held and paid on the way to one."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.rung = _RUNG if len(problem.spans) <= _MANY else _WIDE_RUNG
        regions: dict[int, list[Region]] = defaultdict(list)
        for region in dict.fromkeys(problem.spans):
            regions[region.start].append(region)
        self._again: list[list[tuple[Region | None, int, Recomputed]]] = [
            sorted(
                [(None, place + 1, problem.stepped(place))]
                + [(region, region.stop, problem.recomputed(region)) for region in regions[place]],
                key=lambda move: move[1],
            )
            for place in range(len(problem.steps))
        ]  # by place: what may be done there, by where that ends
        self._ends = [_neighbours([stop for _, stop, _ in moves]) for moves in self._again]
        self._moves = _Table()  # with their operations
        self._chosen: list[Region | None] = []  # by move: what is run again; None where a step just runs
        self._from: dict[tuple[int, _Held], slice] = {}
        self._targets: dict[tuple[int, _Held], int] = {}
        self._held: list[_Held] = []  # by target

    def solve(self, limit: int, dearest: float = math.inf) -> Schedule | None:
        """Return the cheapest schedule that holds no more than `limit` bytes at once and costs no more, or None."""
        end, ways = len(self._problem.steps), _Table()
        none = np.full(1, -1)
        settled = {_NOTHING: ways.add(np.zeros(1, np.int64), none, none, np.zeros(1))}
        arrivals: list[list[_Arrival]] = [[] for _ in range(end + 1)]
        for place in range(end):
            parts = [
                self._possible(ways, at, self._moves_from(place, held), limit, dearest) for held, at in settled.items()
            ]
            for stop, columns in self._ends[place] if parts else ():
                numbers, starts, stops = (np.concatenate([each[row][columns] for each in parts]) for row in range(3))
                arrivals[stop].append((numbers, starts, stops))
            settled = self._settled(ways, arrivals[place + 1])
        if not settled:
            return None
        (last,) = settled.values()  # nothing crosses the end
        return self._problem.schedule(self._path(ways, last.stop - 1))  # the cheapest

    def _possible(self, ways: _Table, at: slice, moves: slice, limit: int, dearest: float) -> _Arrival:
        """Return the moves from a place, and which of the ways to it each may follow."""
        added, needed = self._moves.numbers[_ADDED, moves], self._moves.numbers[_NEEDED, moves]
        most: _Numbers = np.minimum(limit + self._problem.room - needed, limit - added)
        stops: _Numbers = at.start + np.searchsorted(ways.numbers[_SIZE, at], most, "right")
        starts: _Numbers = at.stop - np.searchsorted(ways.costs[at][::-1], dearest - self._moves.costs[moves], "right")
        numbers: _Numbers = np.arange(int(moves.start), int(moves.stop))
        return numbers, starts, stops

    def _moves_from(self, place: int, held: _Held) -> slice:
        """Return all moves from a place; they are the same for every limit."""
        known = self._from.get((place, held))
        if known is not None:
            return known
        added, needed, targets, operations = list[int](), list[int](), list[int](), list[float]()
        for region, stop, again in self._again[place]:
            added.append(self._problem.bytes_of(again.keeps - held))
            needed.append(added[-1] + again.needs)
            targets.append(self._target(stop, (held | again.keeps) & self._problem.crossing[stop]))
            operations.append(again.operations)
            self._chosen.append(region)
        first, second, third = (np.array(each, np.int64) for each in (added, needed, targets))
        known = self._from[place, held] = self._moves.add(first, second, third, np.array(operations))
        return known

    def _target(self, place: int, held: _Held) -> int:
        number = self._targets.setdefault((place, held), len(self._held))
        if number == len(self._held):
            self._held.append(held)
        return number

    def _path(self, ways: _Table, at: int) -> list[Region]:
        """Return the regions on the way to the end that has this number."""
        regions = list[Region]()
        while (number := int(ways.numbers[_MOVE, at])) >= 0:
            region, at = self._chosen[number], int(ways.numbers[_BEFORE, at])
            if region is not None:
                regions.append(region)
        return regions

    def _settled(self, ways: _Table, arrivals: Sequence[_Arrival]) -> dict[_Held, slice]:
        """Return the ways to a place worth following: those of less memory first, the cheapest last."""
        if not arrivals:
            return {}
        moves, starts, stops = (np.concatenate([each[row] for each in arrivals]) for row in range(3))
        is_possible = starts < stops
        moves, starts, counts = moves[is_possible], starts[is_possible], (stops - starts)[is_possible]
        if not len(moves):
            return {}
        before: _Numbers = np.arange(int(counts.sum())) + np.repeat(starts - np.cumsum(counts) + counts, counts)
        targets, group = np.unique(self._moves.numbers[_TARGET, moves], return_inverse=True)
        moves, group = np.repeat(moves, counts), np.repeat(group, counts)
        sizes = ways.numbers[_SIZE, before] + self._moves.numbers[_ADDED, moves]
        costs = ways.costs[before] + self._moves.costs[moves]
        held_there = [self._held[int(target)] for target in targets]
        found: dict[_Held, _Numbers] = dict(zip(held_there, _thinned(sizes, costs, group), strict=True))
        if len(found) > _HELD_SETS:
            cheap = sorted(found, key=lambda held: (costs[found[held][-1]], sizes[found[held][-1]], sorted(held)))
            small = sorted(found, key=lambda held: (sizes[found[held][0]], costs[found[held][0]], sorted(held)))
            few = dict.fromkeys((*cheap[: _HELD_SETS // 2], *small[: _HELD_SETS // 2]))
            found = {held: found[held] for held in few}
        return {held: ways.add(sizes[at], moves[at], before[at], costs[at]) for held, at in found.items()}


def _neighbours(stops: Sequence[int]) -> list[tuple[int, slice]]:
    """Return where equal ones of sorted numbers lie."""
    bounds = [0, *(place for place in range(1, len(stops)) if stops[place] != stops[place - 1]), len(stops)]
    return [(stops[first], slice(first, end)) for first, end in pairwise(bounds)]


def _thinned(sizes: _Numbers, costs: _Costs, group: _Numbers) -> Iterator[_Numbers]:
    """Yield for each group the ways that no other beats, the smallest first; of many those furthest apart."""
    order = np.lexsort((costs, sizes + group * (sizes.max() + 1)))
    # The least cost before, group by group: those of a later group are all made smaller than those of an earlier.
    falling = costs[order] - group[order] * (1.001 * costs.max() + 1)
    is_kept = np.ones(len(order), bool)
    is_kept[1:] = falling[1:] < np.minimum.accumulate(falling)[:-1]
    order = order[is_kept]
    ends: list[int] = np.searchsorted(group[order], np.arange(int(group.max()) + 2)).tolist()
    return (order[_spread(first, end)] for first, end in pairwise(ends))


def _spread(first: int, end: int) -> slice | _Numbers:
    """Return the numbers of the ways to follow of neighbouring ones."""
    if end - first <= _LABELS:
        return slice(first, end)
    return first + np.rint(np.arange(_LABELS) * (end - first - 1) / (_LABELS - 1)).astype(np.int64)

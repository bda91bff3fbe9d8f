"""Choose what is run again: the cheapest schedules for less and less memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
"""Between the plain model and the least, each amount of memory that is solved for is less by this part of it; by the
second where there are more regions to choose from than the third, for each solution takes a second then.
"""

_EXACT = 64
"""Up to so many regions to choose from, every schedule on the frontier is looked for."""

_ROUNDED = 1 + 1e-9
"""Sums of costs differ by at most this factor where they are added in another order."""

_Held = frozenset[int]
_NOTHING: _Held = frozenset()


def frontier(problem: Problem) -> list[Schedule]:
    """Return schedules of less and less memory, each the cheapest known for its own; the plain model comes first."""
    solver, plain = _Solver(problem), problem.schedule(())
    if len(problem.spans) <= _EXACT:
        found = [plain]
        while (schedule := solver.solve(found[-1].peak - 1)) is not None:
            found.append(schedule)
        return front(found)
    smallest = _smallest(solver, plain.peak)
    return front([plain, *smallest, *_ladder(solver, smallest, plain.peak)])


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


def _ladder(solver: _Solver, smallest: Sequence[Schedule], most: int) -> Iterator[Schedule]:
    """Yield the cheapest schedule for larger and larger limits; what it costs is known not to be more than before."""
    if not smallest:
        return
    best = smallest[-1]
    limit = best.peak + best.peak // solver.rung
    while limit < most:
        best = solver.solve(limit, best.operations * _ROUNDED) or best
        yield best
        limit += max(limit // solver.rung, 1)


def front(found: Sequence[Schedule]) -> list[Schedule]:
    """Return the schedules that no other beats in both memory and cost, the largest first."""
    kept: list[Schedule] = []
    for schedule in sorted(found, key=lambda each: (each.operations, each.peak, each.live)):
        if not kept or schedule.peak < kept[-1].peak:
            kept.append(schedule)
    return kept


_Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Ways:
    """The ways of reaching a place with the same activations held, those of less memory first, the cheapest last."""

    sizes: _Numbers  # bytes held there
    costs: NDArray[np.float64]  # so far
    moves: _Numbers  # the numbers of the moves that led here
    before: _Numbers  # which of the ways to where these start they follow

    def at(self, places: _Numbers) -> _Ways:
        """Return those at some places."""
        return _Ways(self.sizes[places], self.costs[places], self.moves[places], self.before[places])


_Arrival = tuple[_Ways, int, int, int]
"""Neighbouring ways to where a move starts, from one number to before another, and the number of the move."""


@dataclass(frozen=True, eq=False)
class _Moves:
    """All moves from a place and what is held there, each with what it does to a way."""

    first: int  # the number of the first of them
    targets: Sequence[tuple[int, _Held]]  # where each ends, and what is held there
    added: _Numbers
    needed: _Numbers
    operations: NDArray[np.float64]


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
        self.rung = _RUNG if len(problem.spans) <= _MANY else _WIDE_RUNG
        self._regions: dict[int, list[tuple[Region, Recomputed]]] = defaultdict(list)
        for region in dict.fromkeys(problem.spans):
            self._regions[region.start].append((region, problem.recomputed(region)))
        self._moves: list[_Move] = []
        self._from: dict[tuple[int, _Held], _Moves] = {}

    def solve(self, limit: int, dearest: float = math.inf) -> Schedule | None:
        """Return the cheapest schedule that holds no more than `limit` bytes at once and costs no more, or None."""
        end = len(self._problem.steps)
        arrivals: list[dict[_Held, list[_Arrival]]] = [defaultdict(list) for _ in range(end + 1)]
        settled = [{_NOTHING: _Ways(np.zeros(1, np.int64), np.zeros(1), np.full(1, -1), np.full(1, -1))}]
        for place in range(end):
            for held, ways in settled[place].items():
                moves = self._moves_from(place, held)
                most = np.minimum(limit + self._problem.room - moves.needed, limit - moves.added)
                stops = ways.sizes.searchsorted(most, "right").tolist()
                starts = (len(ways.costs) - ways.costs[::-1].searchsorted(dearest - moves.operations, "right")).tolist()
                for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
                    if start < stop:
                        to, then = moves.targets[number]
                        arrivals[to][then].append((ways, start, stop, moves.first + number))
            settled.append(self._settled(arrivals[place + 1]))
        return self._problem.schedule(self._path(settled)) if settled[end] else None

    def _moves_from(self, place: int, held: _Held) -> _Moves:
        """Return all moves from a place; they are the same for every limit."""
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
        made = self._moves[first:]
        known = self._from[place, held] = _Moves(
            first, [(move.stop, move.then) for move in made], np.array([move.added for move in made]),
            np.array([move.needed for move in made]), np.array([move.operations for move in made]),
        )  # fmt: skip
        return known

    def _path(self, settled: Sequence[Mapping[_Held, _Ways]]) -> list[Region]:
        """Return the regions on the cheapest way to the end; of equally cheap ones, that which holds least."""
        (ways,) = settled[-1].values()  # nothing crosses the end
        regions, at = list[Region](), -1
        while (number := int(ways.moves[at])) >= 0:
            move, at = self._moves[number], int(ways.before[at])
            if move.region is not None:
                regions.append(move.region)
            ways = settled[move.place][move.held]
        return regions

    def _settled(self, arrivals: Mapping[_Held, Sequence[_Arrival]]) -> dict[_Held, _Ways]:
        """Return the ways to a place worth following."""
        found = self._thinned(arrivals) if arrivals else {}
        if len(found) <= _HELD_SETS:
            return found
        cheap = sorted(found, key=lambda held: (found[held].costs[-1], found[held].sizes[-1], sorted(held)))
        small = sorted(found, key=lambda held: (found[held].sizes[0], found[held].costs[0], sorted(held)))
        return {held: found[held] for held in dict.fromkeys((*cheap[: _HELD_SETS // 2], *small[: _HELD_SETS // 2]))}

    def _thinned(self, arrivals: Mapping[_Held, Sequence[_Arrival]]) -> dict[_Held, _Ways]:
        """Return by what is held the ways that no other beats, the smallest first; of many those furthest apart."""
        every = [arrival for each in arrivals.values() for arrival in each]
        group, joined = self._joined(every, [len(each) for each in arrivals.values()])
        order = _unbeaten(group, joined)
        ends = np.searchsorted(group[order], np.arange(len(arrivals) + 1)).tolist()
        chosen = (order[_spread(first, end)] for first, end in pairwise(ends))
        return {held: joined.at(places) for held, places in zip(arrivals, chosen, strict=True)}

    def _joined(self, every: Sequence[_Arrival], lengths: Sequence[int]) -> tuple[_Numbers, _Ways]:
        """Return the group of each way that arrives, of which the next so many arrivals are one, and all ways."""
        counts = [stop - start for _, start, stop, _ in every]
        moves = [self._moves[number] for *_, number in every]
        sizes = np.concatenate([ways.sizes[start:stop] for ways, start, stop, _ in every])
        costs = np.concatenate([ways.costs[start:stop] for ways, start, stop, _ in every])
        sizes += np.repeat([move.added for move in moves], counts)
        costs += np.repeat([move.operations for move in moves], counts)
        numbers = np.repeat([number for *_, number in every], counts)
        begins = np.array([start for _, start, _, _ in every]) - np.cumsum(counts) + counts
        before: _Numbers = (np.arange(len(sizes)) + np.repeat(begins, counts)).astype(np.int64)
        group = np.repeat(np.repeat(np.arange(len(lengths)), lengths), counts)
        return group, _Ways(sizes, costs, numbers, before)


def _unbeaten(group: _Numbers, ways: _Ways) -> _Numbers:
    """Return the places of the ways that no other of their group beats, group by group, the smallest first."""
    order = np.lexsort((ways.moves, ways.costs, ways.sizes, group))
    # The least cost before, group by group: those of a later group are all made smaller than those of an earlier.
    rank = np.unique(ways.costs, return_inverse=True)[1][order] - group[order] * len(order)
    is_kept = np.ones(len(order), bool)
    is_kept[1:] = rank[1:] < np.minimum.accumulate(rank)[:-1]
    return order[is_kept]


def _spread(first: int, end: int) -> slice | _Numbers:
    """Return the numbers of the ways to follow of neighbouring ones."""
    if end - first <= _LABELS:
        return slice(first, end)
    return first + np.rint(np.arange(_LABELS) * (end - first - 1) / (_LABELS - 1)).astype(np.int64)

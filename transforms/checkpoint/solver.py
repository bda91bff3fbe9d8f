"""Choose what is run again: the cheapest schedules for less and less memory, in the forward's order and others."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from .forward import Forward, Unit
from .problem import Problem, Recomputed, Region, Schedule, Step

__all__ = ["as_run", "depth_first", "front", "frontier", "reordered"]

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


@dataclass(frozen=True, eq=False)
class _Arrival:
    """What one move makes of neighbouring ways to where it starts."""

    sizes: _Numbers
    costs: NDArray[np.float64]
    move: int
    first: int  # the number of the first of them


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
        self._from: dict[tuple[int, _Held], range] = {}

    def solve(self, limit: int, dearest: float = math.inf) -> Schedule | None:
        """Return the cheapest schedule that holds no more than `limit` bytes at once and costs no more, or None."""
        end, most = len(self._problem.steps), limit + self._problem.room
        arrivals: list[dict[_Held, list[_Arrival]]] = [defaultdict(list) for _ in range(end + 1)]
        arrivals[0][frozenset()].append(_Arrival(np.zeros(1, np.int64), np.zeros(1), -1, -1))
        settled = list[dict[_Held, _Ways]]()
        for place in range(end):
            settled.append(_settled(arrivals[place]))
            arrivals[place].clear()
            for held, ways in settled[place].items():
                for number in self._moves_from(place, held):
                    move = self._moves[number]
                    fit = int(ways.sizes.searchsorted(min(most - move.needed, limit - move.added), "right"))
                    costs = ways.costs[:fit] + move.operations
                    first = int(np.count_nonzero(costs > dearest)) if dearest < math.inf else 0
                    if first < fit:
                        sizes = ways.sizes[first:fit] + move.added
                        arrivals[move.stop][move.then].append(_Arrival(sizes, costs[first:], number, first))
        settled.append(_settled(arrivals[end]))
        return self._problem.schedule(self._path(settled)) if settled[end] else None

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

    def _path(self, settled: Sequence[Mapping[_Held, _Ways]]) -> list[Region]:
        """Return the regions on the cheapest way to the end; of equally cheap ones, that which holds least."""
        (ways,) = settled[-1].values()  # nothing crosses the end
        regions, at = list[Region](), -1
        while ways.moves[at] >= 0:
            move = self._moves[ways.moves[at]]
            if move.region is not None:
                regions.append(move.region)
            ways, at = settled[move.place][move.held], ways.before[at]
        return regions


def _settled(arrivals: Mapping[_Held, Sequence[_Arrival]]) -> dict[_Held, _Ways]:
    """Return the ways to a place worth following."""
    found = {held: _thinned(each) for held, each in arrivals.items()}
    if len(found) <= _HELD_SETS:
        return found
    cheap = sorted(found, key=lambda held: (found[held].costs[-1], found[held].sizes[-1], sorted(held)))
    small = sorted(found, key=lambda held: (found[held].sizes[0], found[held].costs[0], sorted(held)))
    return {held: found[held] for held in dict.fromkeys((*cheap[: _HELD_SETS // 2], *small[: _HELD_SETS // 2]))}


def _thinned(arrivals: Sequence[_Arrival]) -> _Ways:
    """Return the ways that no other beats, the smallest first, and of many those that lie furthest apart."""
    sizes, costs = (np.concatenate([getattr(each, name) for each in arrivals]) for name in ("sizes", "costs"))
    counts = [len(each.sizes) for each in arrivals]
    moves = np.repeat([each.move for each in arrivals], counts)
    order = np.lexsort((moves, costs, sizes))
    cheapest = np.minimum.accumulate(costs[order])
    kept = order[np.concatenate(([True], costs[order][1:] < cheapest[:-1]))]
    if len(kept) > _LABELS:
        kept = kept[np.rint(np.arange(_LABELS) * (len(kept) - 1) / (_LABELS - 1)).astype(np.int64)]
    shifts = [each.first - start for each, start in zip(arrivals, accumulate(counts, initial=0), strict=False)]
    return _Ways(sizes[kept], costs[kept], moves[kept], kept + np.repeat(shifts, counts)[kept])


def dataflow(problem: Problem) -> nx.DiGraph[int]:
    """Return which steps read what others make."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(problem.steps)))
    graph.add_edges_from(problem.flow)
    return graph


def depth_first(graph: nx.DiGraph[int]) -> list[int]:
    """Return a topological order in which each branch is run as one, right before what joins it with others."""
    missing: dict[int, int] = dict(graph.out_degree())
    ready = sorted(node for node, count in missing.items() if not count)
    order: list[int] = []
    while ready:
        node = ready.pop()
        order.append(node)
        following: list[int] = []
        for source in graph.predecessors(node):
            missing[source] -= 1
            following += [] if missing[source] else [source]
        ready += sorted(following)
    return order[::-1]


def as_run(problem: Problem, chosen: Sequence[tuple[frozenset[int], bool]]) -> Schedule | None:
    """Return what is to be expected of regions of any steps; None if they cannot run one after another."""
    # A region runs where the last of its steps did, what reads it behind it, all else in its place.
    home = {step: number for number, (steps, _) in enumerate(chosen) for step in steps}
    count = len(chosen)
    places = [home.get(step, count + step) for step in range(len(problem.steps))]
    joined: nx.DiGraph[int] = nx.DiGraph()
    joined.add_nodes_from(places)
    joined.add_edges_from((places[a], places[b]) for a, b in problem.flow if places[a] != places[b])
    if not nx.is_directed_acyclic_graph(joined):
        return None
    last = {place: step for step, place in enumerate(places)}
    order: list[Step] = []
    regions: list[Region] = []
    for place in nx.lexicographical_topological_sort(joined, key=last.__getitem__):
        members = sorted(chosen[place][0]) if place < count else [place - count]
        if place < count:
            regions.append(Region(len(order), len(order) + len(members), chosen[place][1]))
        order += [problem.steps[step] for step in members]
    return replace(problem, steps=order, spans=()).schedule(regions)


def reordered(forward: Forward, repeats: Callable[[Unit], bool]) -> tuple[Forward, list[int]]:
    """Return a forward in which each branch is finished before the next begins, and the old numbers of its steps."""
    mover = _Mover(forward, repeats)
    units = mover.moved(forward.units)
    if sorted(mover.order) != list(range(len(forward.steps))):  # something ran that is of no node
        return forward, list(range(len(forward.steps)))
    new = {old: number for number, old in enumerate(mover.order)}
    written = defaultdict[int, list[int]](list)
    written.update({memory: [new[step] for step in steps] for memory, steps in forward.written.items()})
    touched = [forward.touched[old] for old in mover.order]
    steps = [forward.steps[old] for old in mover.order]
    random = {new[step] for step in forward.random}
    return replace(forward, units=units, steps=steps, touched=touched, written=written, random=random), mover.order


class _Mover:
    """Move the units of every graph."""

    def __init__(self, forward: Forward, repeats: Callable[[Unit], bool]) -> None:
        self.order: list[int] = []
        self._repeats, self._random = repeats, forward.random
        self._writers = {step for steps in forward.written.values() for step in steps}

    def moved(self, units: Sequence[Unit]) -> list[Unit]:
        """Return the units of one call, moved, with their new places."""
        found: list[Unit] = []
        alone = {u.node for u in units if self._repeats(u) and self._writers.isdisjoint(range(u.start, u.stop))}
        for free, group in groupby(units, lambda unit: unit.node in alone):
            for unit in _depth_first(list(group), self._random) if free else group:
                start = len(self.order)
                inside = self.moved(unit.inside)
                self.order += () if inside else range(unit.start, unit.stop)
                found.append(replace(unit, start=start, stop=len(self.order), inside=inside))
        return found


def _depth_first(units: list[Unit], random: set[int]) -> list[Unit]:
    """Return units of one graph, each branch of what they give as one."""
    number = {unit.node: position for position, unit in enumerate(units)}
    flow: nx.DiGraph[int] = nx.DiGraph()
    flow.add_nodes_from(range(len(units)))
    flow.add_edges_from(
        (number[node], number[u.node]) for u in units for node in u.node.all_input_nodes if node in number
    )
    drawing = [number[unit.node] for unit in units if not random.isdisjoint(range(unit.start, unit.stop))]
    flow.add_edges_from(pairwise(drawing))
    return [units[position] for position in depth_first(flow)]

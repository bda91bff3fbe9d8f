"""Other orders of the steps of a forward, in which each branch is finished before the next begins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import networkx as nx

from .forward import Forward, Unit
from .problem import Problem, Region, Schedule, Step

__all__ = ["as_run", "dataflow", "depth_first", "reordered"]


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

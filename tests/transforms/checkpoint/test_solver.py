"""The solver: exact on chains, near the best of all choices on small graphs, and monotonic."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import networkx as nx
import pytest

from fxopt.transforms.checkpoint.problem import Problem, Region, Schedule, Step
from fxopt.transforms.checkpoint.solver import cheapest, frontier


def problem(seed: int, count: int, *, chain: bool) -> Problem:
    """Return a forward of `count` steps, each of which makes what others read and something for itself."""
    draw = random.Random(seed)
    steps: list[Step] = []
    sizes: dict[int, int] = {}
    for number in range(count):
        reads = set(draw.sample(range(number), min(number, draw.choice((1, 1, 2))))) if not chain else {number - 1} - {-1}
        own, inner = number, count + number
        sizes |= {own: draw.randint(1, 9), inner: draw.randint(0, 9)}
        saves = {a for a in (*reads, own) if draw.random() < 0.7} | {inner}
        operations = float(draw.randint(1, 20))
        is_product = draw.random() < 0.4
        steps.append(
            Step(
                frozenset(reads), frozenset({own, inner}), frozenset(saves), operations,
                operations if own in saves else operations * draw.random(),
                frozenset({own} if is_product else ()), operations * (0.1 if is_product else 1.0), operations * 0.1,
            )
        )  # fmt: skip
    stretches = [(a, b) for a in range(count) for b in range(a + 1, count + 1)]
    spans = [Region(a, b, selective) for a, b in stretches for selective in (False, True)]
    return Problem(steps, sizes, spans, overhead=0.5)


def every_choice(given: Problem) -> Iterator[Schedule]:
    """Yield what is to be expected of every set of stretches that do not overlap."""

    def choices(place: int) -> Iterator[tuple[Region, ...]]:
        if place == len(given.steps):
            yield ()
            return
        yield from choices(place + 1)
        for region in given.spans:
            if region.start == place:
                for rest in choices(region.stop):
                    yield (region, *rest)

    for regions in choices(0):
        yield given.schedule(regions)


def every_convex_choice(given: Problem) -> Iterator[Schedule]:
    """Yield what is to be expected of all disjoint sets of steps that can run as one, next to each other or not."""
    count = len(given.steps)
    makers = {activation: number for number, step in enumerate(given.steps) for activation in step.makes}
    edges = [(makers[read], number) for number, step in enumerate(given.steps) for read in step.reads]

    def labels(number: int, used: int) -> Iterator[list[int]]:
        if number == count:
            yield []
            return
        for label in range(used + 2):  # 0 is in no region
            for rest in labels(number + 1, max(used, label)):
                yield [label, *rest]

    for labelled in labels(0, 0):
        places = [label - 1 if label else count + number for number, label in enumerate(labelled)]
        joined = nx.DiGraph()
        joined.add_nodes_from(places)
        joined.add_edges_from((places[a], places[b]) for a, b in edges if places[a] != places[b])
        if not nx.is_directed_acyclic_graph(joined):
            continue
        last = {place: number for number, place in enumerate(places)}
        order = list(nx.lexicographical_topological_sort(joined, key=last.__getitem__))
        members = [[number for number in range(count) if places[number] == place] for place in order]
        yield from in_order(given, members, [place < count for place in order])


def in_order(given: Problem, members: Sequence[list[int]], joined: Sequence[bool]) -> Iterator[Schedule]:
    steps = [given.steps[number] for group in members for number in group]
    regions: list[tuple[int, int]] = []
    place = 0
    for group, is_region in zip(members, joined, strict=True):
        if is_region:
            regions.append((place, place + len(group)))
        place += len(group)
    moved = Problem(steps, given.sizes, (), given.overhead)
    for chosen in range(2 ** len(regions)):
        yield moved.schedule(Region(a, b, bool(chosen >> n & 1)) for n, (a, b) in enumerate(regions))


def best_for(schedules: Sequence[Schedule], limit: int) -> float:
    return min((each.operations for each in schedules if each.peak <= limit), default=float("inf"))


@pytest.mark.parametrize("seed", range(8))
def test_chains_are_solved_exactly(seed: int) -> None:
    given = problem(seed, 6, chain=True)
    found, known = frontier(given), list(every_choice(given))
    assert found[-1].peak == min(each.peak for each in known)
    for limit in range(found[-1].peak, given.saved + 1):
        schedule = cheapest(found, limit)
        assert schedule is not None
        assert schedule.peak <= limit
        assert schedule.operations == pytest.approx(best_for(known, limit))


def test_small_graphs_are_solved_within_a_twentieth_of_the_best_there_is() -> None:
    spent = best = 0.0
    for seed in range(30):
        given = problem(100 + seed, 4 + seed % 3, chain=False)
        found, known = frontier(given), list(every_convex_choice(given))
        for limit in range(found[-1].peak, given.saved + 1):
            schedule = cheapest(found, limit)
            assert schedule is not None
            spent += schedule.operations
            best += best_for(known, limit)
            worst = schedule.operations / max(1e-9, best_for(known, limit)) if schedule.operations else 1.0
            if worst>1.05: print(seed, limit, worst, found[-1].peak, min(k.peak for k in known))
    print(spent/best)
    assert spent <= 1.05 * best

"""The solver: exact on chains, near the best of all choices on small graphs, and monotonic."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from fxopt.transforms.checkpoint import solver
from fxopt.transforms.checkpoint.orders import as_run, dataflow, depth_first
from fxopt.transforms.checkpoint.problem import Problem, Region, Schedule, Step
from fxopt.transforms.checkpoint.solver import front, frontier


def problem(seed: int, count: int, *, chain: bool) -> Problem:
    """Return a forward of `count` steps, each of which makes what others read and something for itself."""
    draw = random.Random(seed)
    steps: list[Step] = []
    sizes: dict[int, int] = {}
    for number in range(count):
        reads = {number - 1} - {-1} if chain else set(draw.sample(range(number), min(number, draw.choice((1, 1, 2)))))
        if number == count - 1:
            reads |= set(range(number)) - {read for step in steps for read in step.reads}  # a model has one result
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
                learned=draw.randint(0, 4),
            )
        )  # fmt: skip
    stretches = [(a, b) for a in range(count) for b in range(a + 1, count + 1)]
    spans = [Region(a, b, selective) for a, b in stretches for selective in (False, True)]
    gradients = {number: sizes[number] for number in range(count)}
    return Problem(steps, sizes, spans, 0.5, gradients, frozenset({count - 1}), loss=3 * sizes[count - 1])


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

    def labels(number: int, used: int) -> Iterator[list[int]]:
        if number == count:
            yield []
            return
        for label in range(used + 2):  # 0 is in no region
            for rest in labels(number + 1, max(used, label)):
                yield [label, *rest]

    for labelled in labels(0, 0):
        groups = [frozenset(n for n in range(count) if labelled[n] == label) for label in sorted({*labelled} - {0})]
        for kinds in itertools.product((False, True), repeat=len(groups)):
            schedule = as_run(given, list(zip(groups, kinds, strict=True)))
            if schedule is not None:
                yield schedule


def whole_frontier(given: Problem) -> list[Schedule]:
    """Return what is found for every limit, as among few regions to choose from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "_EXACT", 1000)
        return frontier(given, 0)


def best_for(schedules: Sequence[Schedule], limit: int) -> float:
    return min((each.operations for each in schedules if each.peak <= limit), default=float("inf"))


@pytest.mark.parametrize("seed", range(8))
def test_chains_are_solved_exactly(seed: int) -> None:
    given = problem(seed, 6, chain=True)
    found, known = whole_frontier(given), list(every_choice(given))
    assert found[-1].peak == min(each.peak for each in known)
    for limit in range(found[-1].peak, given.saved + 1):
        assert best_for(found, limit) == pytest.approx(best_for(known, limit))


def test_where_the_loss_takes_most_only_what_is_held_after_the_forward_counts() -> None:
    for seed in range(4):
        given = replace(problem(seed, 6, chain=True), loss=1000)
        assert whole_frontier(given)[-1].peak == min(each.live for each in every_choice(given))


def test_gradients_of_parameters_count_only_where_the_plain_step_has_room_for_them() -> None:
    given = problem(3, 6, chain=True)
    heavy = replace(given, steps=[replace(given.steps[0], learned=1000), *given.steps[1:]])
    assert whole_frontier(heavy)[-1].peak < heavy.saved


def in_both_orders(given: Problem) -> list[Schedule]:
    """Return what is found in the order in which the steps run, and in that where branches are finished first."""
    order = depth_first(dataflow(given))
    moved = replace(given, steps=[given.steps[number] for number in order])
    regions = (
        [(frozenset(order[region.start : region.stop]), region.selective) for region in schedule.regions]
        for schedule in whole_frontier(moved)
    )
    others = [schedule for each in regions if (schedule := as_run(given, each)) is not None]
    return front([*whole_frontier(given), *others])


def test_small_graphs_are_solved_within_a_twentieth_of_the_best_there_is() -> None:
    spent = best = 0.0
    for seed in range(12):
        given = problem(100 + seed, 4 + seed % 2, chain=False)
        found, known = in_both_orders(given), list(every_convex_choice(given))
        for limit in range(found[-1].peak, given.saved + 1):
            spent += best_for(found, limit)
            best += best_for(known, limit)
    assert best <= spent <= 1.05 * best


def test_less_memory_never_costs_less() -> None:
    for seed in range(6):
        found = whole_frontier(problem(200 + seed, 9, chain=bool(seed % 2)))
        assert all(a.peak > b.peak and a.operations < b.operations for a, b in itertools.pairwise(found))
        assert found[0].operations == 0


def test_a_search_for_one_limit_costs_no_more_than_one_for_all() -> None:
    for seed in range(6):
        given = problem(200 + seed, 9, chain=True)
        every = whole_frontier(given)
        for share in (2.0, 0.9, 0.6, 0.4, 0.0):
            limit = share * given.saved
            known, found = (
                next((s for s in each if s.peak <= limit), None) for each in (every, frontier(given, limit))
            )
            assert known is None or (found is not None and found.operations <= known.operations * (1 + 1e-9))
        peak = frontier(given, 0)[-1].peak
        assert peak - max(peak // 16, 1) < every[-1].peak <= peak

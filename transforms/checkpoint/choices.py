"""All that is worth choosing from: sets of regions of a model, from the fastest to the smallest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...tracing.program import Program
from .forward import Forward, traced_forward
from .orders import as_run, reordered
from .problem import Problem, Schedule
from .solver import front, frontier
from .spans import Search, Stretch

__all__ = ["Choice", "Choices", "choices"]

_OVERHEAD = 1e7
"""Operations that take as long as entering a region, leaving it and entering it again: a fifth of a millisecond."""

_MOST_SPANS = 600
"""Up to so many possible regions are also looked for in another order of the steps."""


@dataclass(frozen=True)
class Choice:
    """Regions of a model."""

    schedule: Schedule  # what is to be expected of them
    stretches: tuple[Stretch, ...]  # the nodes of each


@dataclass(frozen=True)
class Choices:
    """What a budget chooses from."""

    problem: Problem  # the forward as it runs
    frontier: Sequence[Choice]  # choices of less and less memory, each the cheapest known for its own
    obstacles: Mapping[str, str]  # name of a node -> why it is in no region


def choices(program: Program) -> Choices:
    """Return the regions worth choosing from for the model's first example call."""
    forward = traced_forward(program)
    search = Search(program, forward)
    found = search.stretches()
    problem = forward.problem(list(found), _OVERHEAD)
    known = [Choice(each, tuple(found[region] for region in each.regions)) for each in frontier(problem)]
    if len(found) <= _MOST_SPANS:
        known += _in_another_order(program, forward, search, problem)
    schedules = {id(choice.schedule): choice for choice in known}
    best = [schedules[id(schedule)] for schedule in front([choice.schedule for choice in known])]
    return Choices(problem, best, search.obstacles)


def _in_another_order(program: Program, forward: Forward, search: Search, problem: Problem) -> list[Choice]:
    """Return what is found where each branch is finished before the next begins."""
    moved, order = reordered(forward, search.repeats)
    if order == sorted(order):
        return []
    found = Search(program, moved).stretches()
    choices: list[Choice] = []
    for schedule in frontier(replace(problem, steps=moved.steps, spans=list(found))):
        regions = [(frozenset(order[each.start : each.stop]), each.selective) for each in schedule.regions]
        expected = as_run(problem, regions)
        if expected is not None:
            choices.append(Choice(expected, tuple(found[region] for region in schedule.regions)))
    return choices

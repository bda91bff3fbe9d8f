"""Which parts of a forward may be run again, and the sets of them worth choosing from, from fastest to smallest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...compat import has_hooks
from ...operators import canonical_name, has_random_effects, mutates, operator_of_module
from ...passes.rewriting import has_effects, writes
from ...runtime.graphs import capture_of
from ...runtime.guards import require
from ...runtime.values import is_leaf, qualified, user_class
from ...tracing.program import Program
from .forward import Forward, Unit, traced_forward
from .orders import as_run, reordered
from .problem import Problem, Region, Schedule
from .recomputation import counts
from .solver import front, frontier

__all__ = ["Choice", "Choices", "Search", "Stretch", "choices"]


_PLACES = 40
"""Of one graph so many places, those that the least memory crosses, may be where a region begins or ends."""

_LEAST_GAIN = 2e-4
"""A region that frees less than this part of what the model saves is not worth looking at."""

_UNKNOWN = "it may do more than give a value"
_OURS = f"{__name__.split('.', maxsplit=1)[0]}.layers."


@dataclass(frozen=True)
class Stretch:
    """Nodes of one graph, next to each other, that may be a region."""

    region: Region  # the steps that they are
    units: tuple[Unit, ...]
    saved: int  # bytes that they save for the backward as they are
    kept: int  # bytes that are kept where they are a region


@dataclass
class Search:
    """Look for stretches in every graph that one call alone runs."""

    program: Program
    forward: Forward
    left_out: dict[str, str] = field(default_factory=dict[str, str])  # node -> why it is in no region
    problem: Problem = field(init=False)

    def __post_init__(self) -> None:
        self.problem = self.forward.problem()

    def stretches(self) -> dict[Region, Stretch]:
        """Return what may be a region, by its steps; of what has the same steps, the outermost."""
        found: dict[Region, Stretch] = {}
        for units in self.sequences():
            for run in self.runs(units):
                for stretch in self.among(run):
                    found.setdefault(stretch.region, stretch)
        return found

    def sequences(self) -> Iterator[list[Unit]]:
        """Yield the units of each graph; of a module that is called twice neither call can be told from the other."""
        found: list[list[Unit]] = []
        pending = [self.forward.units]
        for units in pending:
            found.append(units)
            pending += [unit.inside for unit in units if unit.inside]
        calls = Counter(units[0].owner for units in found if units)
        yield from (units for units in found if units and calls[units[0].owner] == 1)

    def runs(self, units: Sequence[Unit]) -> Iterator[list[Unit]]:
        """Yield the longest stretches of units that may all be run again."""
        run: list[Unit] = []
        for unit in units:
            if self.repeats(unit) and not any(user.target is require for user in unit.node.users):
                run.append(unit)
                continue
            yield run
            run = []
        yield run

    def repeats(self, unit: Unit) -> bool:
        """Say whether running a node again does the same once more, and nothing else."""
        name = qualified(unit.owner, unit.node.name)
        reason = self._reason_against(unit)
        if reason and unit.stop > unit.start:
            self.left_out.setdefault(name, reason)
        return not reason and all(map(self.repeats, unit.inside))

    def _reason_against(self, unit: Unit) -> str:
        node = unit.node
        if node.meta.get("draws") == "host":
            return "it draws random numbers from outside of torch"
        called = self.program.callee(unit.owner, node) if node.op == "call_module" else None
        name = canonical_name(node) if called is None else operator_of_module(user_class(type(called)))
        if name == "rrelu":
            return "its backward needs the noise that it draws, which is not there yet where recomputation stops"
        if called is None:  # what a pass has put into the graph and writes is seen as it runs
            ours = str(getattr(node.target, "__module__", "")).startswith(_OURS)
            known = mutates(node) or has_random_effects(node) or ours
            return "" if known or not has_effects(node, self.program, unit.owner) else _UNKNOWN
        if has_hooks(called):
            return "it has hooks, which would run twice"
        if unit.inside:
            return ""
        if capture_of(called) is not None or not is_leaf(called):
            return "it has no graph for this call"
        harmless = counts(called) or getattr(called, "inplace", False) or not writes(node, self.program, unit.owner)
        return "" if harmless else _UNKNOWN

    def among(self, run: Sequence[Unit]) -> Iterator[Stretch]:
        places = self._places(run)
        starts = {unit.start: number for number, unit in reversed(list(enumerate(run))) if unit.stop > unit.start}
        stops = {unit.stop: number + 1 for number, unit in enumerate(run)}
        for start in places:
            for stop in places:
                if start < stop and start in starts and stop in stops and self._is_sound(start, stop):
                    units = tuple(run[starts[start] : stops[stop]])
                    for selective in (False, True):
                        stretch = self._stretch(Region(start, stop, selective), units)
                        if stretch is not None:
                            yield stretch

    def _places(self, run: Sequence[Unit]) -> list[int]:
        """Return where regions may begin and end, if need be only where the least memory crosses."""
        places = sorted({place for unit in run for place in (unit.start, unit.stop)})
        crossing = self.problem.crossing
        if len(places) > _PLACES:
            narrow = sorted(places, key=lambda place: (self.problem.bytes_of(crossing[place]), place))
            places = sorted(narrow[:_PLACES])
        return places

    def _is_sound(self, start: int, stop: int) -> bool:
        """Say whether all that the steps read is still there, as it was, when they are run again."""
        steps = range(start, stop)
        made = {activation for step in steps for activation in self.forward.steps[step].makes}
        given = {memory for step in steps for memory in self.forward.touched[step]} - made
        return not any(when >= start for memory in given for when in self.forward.written.get(memory, ()))

    def _stretch(self, region: Region, units: tuple[Unit, ...]) -> Stretch | None:
        """Return a stretch, where it can be a region and is worth looking at."""
        steps = self.forward.steps[region.start : region.stop]
        products = {activation for step in steps for activation in step.products}
        if region.selective and (not products or products & self.forward.written.keys()):
            return None
        saved = self.problem.bytes_of({activation for step in steps for activation in step.saves})
        kept = self.problem.bytes_of(self.problem.keeps(region))
        return Stretch(region, units, saved, kept) if saved - kept > _LEAST_GAIN * self.problem.saved else None


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
    saved: int  # bytes of which the budget is a share
    most: float  # bytes that the budget allows
    frontier: Sequence[Choice]  # choices of less and less memory, each the cheapest known for its own
    left_out: Mapping[str, str]  # name of a node -> why it is in no region


def choices(program: Program, limit: Callable[[int], float]) -> Choices:
    """Return the regions worth choosing from for the model's first example call.

    `limit`: how many bytes the budget allows of a model that holds so many.
    """
    forward = traced_forward(program)
    search = Search(program, forward)
    found = search.stretches()
    problem = forward.problem(list(found), _OVERHEAD)
    saved = problem.saved if program.held is None else program.held
    most = limit(saved)
    known = [Choice(each, tuple(found[region] for region in each.regions)) for each in frontier(problem, most)]
    if len(found) <= _MOST_SPANS:
        known += _in_another_order(program, forward, search, problem, most)
    schedules = {id(choice.schedule): choice for choice in known}
    best = [schedules[id(schedule)] for schedule in front([choice.schedule for choice in known])]
    return Choices(problem, saved, most, best, search.left_out)


def _in_another_order(
    program: Program, forward: Forward, search: Search, problem: Problem, most: float
) -> list[Choice]:
    """Return what is found where each branch is finished before the next begins."""
    moved, order = reordered(forward, search.repeats)
    if order == sorted(order):
        return []
    found = Search(program, moved).stretches()
    choices: list[Choice] = []
    for schedule in frontier(replace(problem, steps=moved.steps, spans=list(found)), most):
        regions = [(frozenset(order[each.start : each.stop]), each.selective) for each in schedule.regions]
        expected = as_run(problem, regions)
        if expected is not None:
            choices.append(Choice(expected, tuple(found[region] for region in schedule.regions)))
    return choices

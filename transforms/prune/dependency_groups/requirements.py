"""What sizes count, and whether they still do once units are removed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from .index_classes import Array, Solution
from .sizes import Count, Requirement, Size, Source, value_of

__all__ = ["Assigned", "Broken", "assigned", "broken"]

Assigned: TypeAlias = "Mapping[Source, tuple[int, Array]]"
"""Where a number is written -> the number, and the units that it counts."""


class Broken(NamedTuple):
    """A requirement that does not hold once units of a group are removed, and why."""

    requirement: Requirement
    group: int
    why: str


def assigned(requirements: Iterable[Requirement], solution: Solution) -> Assigned:
    """Work out what each number that is written down counts: where it is used for several things, the first."""
    known: dict[Source, tuple[int, Array]] = {}
    for each in requirements:
        if each.count is None or not isinstance(each.size, Size) or not isinstance(each.size.term, Source):
            continue
        units = each.count.units(solution)
        before = known.get(each.size.term)
        if before is None or not before[1].any():
            known[each.size.term] = int(each.size), units
    return {source: (value, units) for source, (value, units) in known.items() if units.any()}


def broken(requirements: Sequence[Requirement], known: Assigned, solution: Solution, group: Array) -> Iterator[Broken]:
    """Yield the requirements that do not hold once units are removed.

    Args:
        requirements: all of them.
        known: what numbers count.
        solution: which atoms go together.
        group: unit -> the number of its group, or -1.
    """
    cuts = _Cuts(group)
    for each in requirements:
        needed = None if each.count is None else each.count.units(solution)
        involved = [*([] if needed is None else [needed]), *_units_of(each.size, known, solution)]
        if not involved or not any(units.any() for units in involved):
            continue
        groups = np.unique(group[np.concatenate(involved)])
        for number in groups[groups >= 0].tolist():
            if not all(_holds(each, needed, known, solution, removed) for removed in cuts.of(number)):
                yield Broken(each, number, _explained(each))


class _Cuts:
    """Choose units to try: of a group the first, two, all but one, and some; alone, and with some of other groups."""

    def __init__(self, group: Array) -> None:
        self._group = group
        self._known: dict[int, list[Array]] = {}
        self._some = np.random.default_rng(0).random((2, len(group))) < ((1 / 3,), (2 / 3,))

    def of(self, number: int) -> list[Array]:
        """Return, for each trial, which atoms are removed."""
        if number not in self._known:
            mine = self._group == number
            units = np.flatnonzero(mine)
            chosen = [units[:1], units[:2], units[:-1], *(units[some[units]] for some in self._some)]
            alone = [self._removed(each) for each in chosen]
            others = [np.where(mine | (self._group < 0), 0, some).astype(np.int64) for some in self._some]
            self._known[number] = [*alone, *(each + other for each in alone for other in others)]
        return self._known[number]

    def _removed(self, units: Array) -> Array:
        removed = np.zeros(len(self._group), dtype=np.int64)
        removed[units] = 1
        return removed


def _holds(each: Requirement, needed: Array | None, known: Assigned, solution: Solution, removed: Array) -> bool:
    def of_source(source: Source) -> int:
        found = known.get(source)
        return source.value if found is None else found[0] - int(removed[found[1]].sum())

    def of_count(count: Count) -> int:
        units = count.units(solution)
        return len(units) - int(removed[units].sum())

    expected = int(each.size) if needed is None else len(needed) - int(removed[needed].sum())
    return value_of(each.size, of_source, of_count) == expected


def _units_of(size: int, known: Assigned, solution: Solution) -> Iterator[Array]:
    """Yield the units that a size depends on."""
    if not isinstance(size, Size):
        return
    if isinstance(size.term, Count):
        yield size.term.units(solution)
    elif isinstance(size.term, Source):
        if size.term in known:
            yield known[size.term][1]
    else:
        for part in size.term[1:]:
            yield from _units_of(part, known, solution)


def _explained(each: Requirement) -> str:
    if not isinstance(each.size, Size):
        return f"{each.why}: the size {each.size} is written in its code"
    if isinstance(each.size.term, Source):
        return f"{each.why}: the number {int(each.size)} is also used for what stays"
    return f"{each.why}: the size {int(each.size)} is computed from another width"

"""Sizes: numbers that know where they come from, and whether they still count what they must once units are gone."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from .labels import Array, Solution

__all__ = ["Assigned", "Broken", "Count", "Requirement", "Size", "Source", "assigned", "broken", "marked"]


@dataclass(frozen=True)
class Source:
    """Where a plain number is written."""

    owner: str
    specialization: int  # -1: in an attribute
    name: str  # of the node or attribute
    path: tuple[str | int, ...] = ()  # in the node's arguments or the attribute's value
    value: int = 0

    @property
    def is_attribute(self) -> bool:
        return self.specialization < 0


@dataclass(frozen=True, eq=False)
class Count:
    """The indices along an axis of a block."""

    block: Array
    axis: int

    def units(self, solution: Solution) -> Array:
        """Return the unit of each index, `FIXED` for those that stay."""
        return solution.line(self.block, self.axis)


Term: TypeAlias = "Source | Count | tuple[Callable[[int, int], int], int, int]"


class Size(int):
    """A number with its origin; arithmetic with whole numbers keeps it."""

    term: Term
    given: Source | None  # where a graph's node was given it, if it was computed

    def __new__(cls, value: int, term: Term, given: Source | None = None) -> Size:
        made = super().__new__(cls, value)
        made.term, made.given = term, given
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)

    def __deepcopy__(self, memo: object) -> int:
        return int(self)


def _arithmetic(function: Callable[[int, int], int], *, reflected: bool) -> Callable[[Size, Any], Any]:
    def compute(self: Size, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            return NotImplemented
        left, right = (other, self) if reflected else (self, other)
        return Size(function(int(left), int(right)), (function, left, right))

    return compute


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _function = getattr(operator, _name)
    setattr(Size, f"__{_name}__", _arithmetic(_function, reflected=False))
    setattr(Size, f"__r{_name}__", _arithmetic(_function, reflected=True))
Size.__neg__ = lambda self: Size(-int(self), (operator.sub, 0, self))  # type: ignore[method-assign]


def marked(value: Any, source: Source) -> Any:
    """Return plain arguments in which each whole number knows where it is written: at `source`, or on from there."""
    if type(value) is int:
        return Size(value, dataclasses.replace(source, value=value))
    if type(value) in (tuple, list):
        items = enumerate(cast("Sequence[Any]", value))
        return type(value)(marked(item, dataclasses.replace(source, path=(*source.path, i))) for i, item in items)
    return value


@dataclass(frozen=True, eq=False)
class Requirement:
    """A size must be the number of the kept indices of what it counts, or, without `count`, stay what it is."""

    size: int
    count: Count | None
    why: str
    module: str
    own: bool = False  # whether that was found in the own forward of a module that has a graph


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
        before = known.get(each.size.term)
        if before is None or not before[1].any():
            known[each.size.term] = int(each.size), each.count.units(solution)
    return {source: (value, units) for source, (value, units) in known.items() if units.any()}


def broken(requirements: Sequence[Requirement], known: Assigned, solution: Solution, group: Array) -> Iterator[Broken]:
    """Yield the requirements that do not hold once units are removed; `group` is unit -> number of its group, or -1."""
    cuts = _Cuts(group)
    for each in requirements:
        needed = None if each.count is None else each.count.units(solution)
        involved = [*([] if needed is None else [needed]), *_units_of(each.size, known, solution)]
        groups = np.unique(group[np.concatenate(involved)]) if any(units.any() for units in involved) else group[:0]
        for number in groups[groups >= 0].tolist():
            for removed in cuts.of(number):
                expected = int(each.size) if needed is None else _left(needed, removed)
                if _value_of(each.size, known, solution, removed) != expected:
                    yield Broken(each, number, _explained(each))
                    break


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
            alone = [np.isin(np.arange(len(self._group)), each).astype(np.int64) for each in chosen]
            others = [np.where(mine | (self._group < 0), 0, some).astype(np.int64) for some in self._some]
            self._known[number] = [*alone, *(each + other for each in alone for other in others)]
        return self._known[number]


def _left(units: Array, removed: Array) -> int:
    return len(units) - int(removed[units].sum())


def _value_of(size: int, known: Assigned, solution: Solution, removed: Array) -> int:
    """Work a size out anew, with some atoms removed."""
    if not isinstance(size, Size):
        return size
    if isinstance(size.term, Count):
        return _left(size.term.units(solution), removed)
    if isinstance(size.term, Source):
        value, units = known.get(size.term, (size.term.value, None))
        return value if units is None else value - int(removed[units].sum())
    function, left, right = size.term
    by = _value_of(right, known, solution, removed)
    if function in (operator.floordiv, operator.mod) and by == 0:
        return -1
    return function(_value_of(left, known, solution, removed), by)


def _units_of(size: int, known: Assigned, solution: Solution) -> Iterator[Array]:
    if not isinstance(size, Size):
        return
    if isinstance(size.term, Count):
        yield size.term.units(solution)
    elif not isinstance(size.term, Source):
        for part in size.term[1:]:
            yield from _units_of(part, known, solution)
    elif size.term in known:
        yield known[size.term][1]


def _explained(each: Requirement) -> str:
    if not isinstance(each.size, Size):
        return f"{each.why}: the size {each.size} is written in its code"
    if isinstance(each.size.term, Source):
        return f"{each.why}: the number {int(each.size)} is also used for what stays"
    return f"{each.why}: the size {int(each.size)} is computed from another width"

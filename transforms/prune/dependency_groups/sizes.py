"""Sizes: numbers that know where they come from, and what must hold between them and what they count."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from .index_classes import Array, Solution

__all__ = ["Count", "Requirement", "Size", "Source", "marked", "value_of"]


@dataclass(frozen=True)
class Source:
    """Where a plain number is written.

    Attributes:
        owner: the module that holds it, in its graph or as an attribute.
        specialization: of its graphs, the number; -1 for an attribute.
        name: of the node, or of the attribute.
        path: the way to the number in the node's arguments, or in the attribute's value.
        value: the number.
    """

    owner: str
    specialization: int
    name: str
    path: tuple[str | int, ...]
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
    """A number with its origin; arithmetic with whole numbers keeps it.

    Attributes:
        term: how it comes about.
        given: where a graph's node was given it, if it was computed.
    """

    term: Term
    given: Source | None

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


@dataclass(frozen=True, eq=False)
class Requirement:
    """A size must be the number of the kept indices of what it counts.

    Attributes:
        size: the size.
        count: what it counts; None if it must stay what it is.
        why: the operation that needs it, with its place.
        module: the module whose code or graph it is.
        own: whether it was found in the own forward of a module that has a graph.
    """

    size: int
    count: Count | None
    why: str
    module: str
    own: bool = False


def value_of(size: int, of_source: Callable[[Source], int], of_count: Callable[[Count], int]) -> int:
    """Work a size out anew."""
    if not isinstance(size, Size):
        return size
    if isinstance(size.term, Source):
        return of_source(size.term)
    if isinstance(size.term, Count):
        return of_count(size.term)
    function, left, right = size.term
    right_value = value_of(right, of_source, of_count)
    if function in (operator.floordiv, operator.mod) and right_value == 0:
        return -1
    return function(value_of(left, of_source, of_count), right_value)


def marked(value: Any, source: Callable[[tuple[str | int, ...]], Source], path: tuple[str | int, ...] = ()) -> Any:
    """Return plain arguments in which each whole number knows where it is written."""
    if type(value) is int:
        return Size(value, dataclasses.replace(source(path), value=value))
    if type(value) in (tuple, list):
        items = cast("Sequence[Any]", value)
        return type(value)(marked(item, source, (*path, i)) for i, item in enumerate(items))
    return value

"""What a capture assumed: conditions over the arguments, and conditions in the middle of a graph."""

from __future__ import annotations

import enum
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeGuard, cast

from torch import Tensor

from ...errors import GuardError
from ..values import Kept, qualified
from .sources import (
    TOLD,
    Applied,
    Attribute,
    Constant,
    Known,
    Read,
    Source,
    Term,
    Writer,
    attribute_at,
    constant,
    is_training,
    item_of,
    key_of,
    reader,
    type_of,
)
from .spelling import told_name

__all__ = [
    "NOT_HELD", "Check", "Condition", "Equals", "Guard", "GuardMiss", "Has", "Is", "IsNot", "Lacks",
    "Tally", "Truth", "equal", "exactly", "in_evaluation", "is_tensor", "of_class", "require", "same_type",
]  # fmt: skip


NOT_HELD = (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)
"""What a guard that cannot be evaluated raises: it does not hold."""
_ISINSTANCE: Any = isinstance
"""The builtin itself; another one is in its place while a forward is traced."""


class Check(Term):
    """What a guard asks of the value of its source: what it compares with, how code spells it, and when it holds."""

    __slots__ = ()

    @abstractmethod
    def text(self, value: str, write: Writer) -> str:
        """Return Python for whether the value that `value` spells is as it should be."""

    @abstractmethod
    def holds(self, value: Any, read: Read) -> Any:
        """Say whether a value is as it should be, given what reads the sources that it is compared with."""

    def over(self, replaced: Mapping[Source, Source]) -> Self:
        """Return the check with others in the place of some sources."""
        return self._made_over(replaced)


@dataclass(frozen=True, slots=True)
class _Compared(Check):
    """It stands in a relation to something, which code spells by a sign between the two."""

    expected: Source
    sign: ClassVar[str]
    relation: ClassVar[Callable[[Any, Any], bool]]

    def text(self, value: str, write: Writer) -> str:
        return f"{value} {self.sign} {write(self.expected)}"

    def holds(self, value: Any, read: Read) -> Any:
        return type(self).relation(value, read(self.expected))


class Equals(_Compared):
    """It is equal to something."""

    __slots__ = ()
    sign, relation = "==", operator.eq


class Is(_Compared):
    """It is a certain object: None, a flag, a class, what is found elsewhere."""

    __slots__ = ()
    sign, relation = "is", operator.is_


class IsNot(_Compared):
    """It is any other object."""

    __slots__ = ()
    sign, relation = "is not", operator.is_not


@dataclass(frozen=True, slots=True)
class Truth(Check):
    """It counts as true, or as false."""

    expected: bool

    def text(self, value: str, write: Writer) -> str:
        return value if self.expected else f"not {value}"

    def holds(self, value: Any, read: Read) -> Any:
        return bool(value) is self.expected


@dataclass(frozen=True, slots=True)
class Has(Check):
    """A key is in it."""

    key: Constant
    present: ClassVar[bool] = True

    def text(self, value: str, write: Writer) -> str:
        return f"{write(self.key)} {'in' if self.present else 'not in'} {value}"

    def holds(self, value: Any, read: Read) -> Any:
        return (self.key.value in value) is self.present


class Lacks(Has):
    """A key is not in it."""

    __slots__ = ()
    present = False


@dataclass(frozen=True, slots=True)
class Guard:
    """One condition that a capture holds under; those with one condition are equal. `str` is for people."""

    source: Source  # in terms of the forward's arguments and `self`
    check: Check
    reason: str = field(default="", compare=False)  # what was assumed, and where, for the report

    def holds(self, names: Mapping[str, Any]) -> bool:
        """Say whether it holds for a call whose arguments (and `self`) are `names`; an error counts as no."""
        return self.holds_as_read(reader(names))

    def holds_as_read(self, read: Read) -> bool:
        """Say whether it holds where `read` gives the values of sources; an error counts as no."""
        try:
            return bool(self.check.holds(read(self.source), read))
        except NOT_HELD:
            return False

    def over(self, replaced: Mapping[Source, Source]) -> Guard:
        """Return the guard with others in the place of some sources."""
        return Guard(self.source.over(replaced), self.check.over(replaced), self.reason)

    def sources(self) -> Iterator[Source]:
        """Yield all that it looks at and compares with, and what that is made of."""
        for source in (self.source, *self.check.parts):
            yield from source.all()

    @property
    def asks_for_training(self) -> bool:
        """Say whether it is about the mode of a module."""
        return any(map(is_training, self.sources()))

    def text(self, write: Writer) -> str:
        """Return the condition as Python."""
        return self.check.text(write(self.source), write)

    def __str__(self) -> str:
        return self.text(TOLD)


# -- guards of several kinds -----------------------------------------------------------------------------------------


def equal(source: Source, value: Any, reason: str = "") -> Guard | None:
    """Return a guard on a plain value, None where it has no spelling; None and flags are known by identity."""
    expected = constant(value)
    if expected is None:
        return None
    check = (Is if value is None or isinstance(value, bool) else Equals)(expected)
    return Guard(source, check, reason or f"{source} is {expected}")


def exactly(source: Source, value: Any, reason: str = "") -> list[Guard]:
    """Return guards on a plain value, a short container of such, or an enumeration's member; none for any other.
    What `==` takes for the same is told apart, in containers too: 1, 1.0 and True, 0.0 and -0.0.
    """
    if isinstance(value, enum.Enum):
        return [Guard(source, Is(Known(value)), reason or f"{source} is {told_name(value)}")]
    same = equal(source, value, reason)
    if same is None and type(value) is not float:
        return []
    because = reason or f"{source} is {value}"
    by_text = Guard(Applied(str, (source,)), Equals(key_of(str(value))), because)
    if same is None:
        return [by_text]  # not a number, which equals nothing
    if isinstance(same.check, Is):
        return [same]
    if type(value) in (int, float):
        typed = same_type(source, value, same.reason)
        return [same, typed, by_text] if type(value) is float and value == 0 else [same, typed]
    if not _has_numbers(value):
        return [same]
    if _is_told_by_types(value):
        return [same, *_typed(source, value, because)]
    return [same, by_text]


_TOLD_BY_TYPE, _MOST_TYPES = (bool, int, str, type(None)), 4
"""What is equal and of one type is the same; of few items the types are had in a third of the time of the text."""


def _is_told_by_types(value: Any) -> TypeGuard[tuple[Any, ...]]:
    items = cast("tuple[Any, ...]", value) if type(value) is tuple else None
    return items is not None and len(items) <= _MOST_TYPES and all(type(item) in _TOLD_BY_TYPE for item in items)


def _typed(source: Source, value: tuple[Any, ...], reason: str) -> Iterator[Guard]:
    """Yield guards on the types of a tuple that is equal to another one, and of the numbers in it."""
    yield same_type(source, value, reason)
    for place, item in enumerate(value):
        if _has_numbers(item):
            yield same_type(item_of(source, place), item, reason)


def _has_numbers(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_numbers, (part for pair in cast("dict[Any, Any]", value).items() for part in pair)))
    if isinstance(value, (list, tuple, set)):
        return any(map(_has_numbers, cast("Iterable[Any]", value)))
    return isinstance(value, (bool, int, float))


def same_type(source: Source, value: Any, reason: str) -> Guard:
    """Return a guard on the type of a value: exactly that of another one, which is one of Python's own or torch's."""
    return Guard(type_of(source), Is(Known(type(value))), reason)


def of_class(source: Source, cls: type[Any], reason: str) -> Guard:
    """Return a guard on the class of a value, by its name: classes made on the fly are named like the user's."""
    return Guard(Attribute(type_of(source), "__qualname__"), Equals(key_of(cls.__qualname__)), reason)


def is_tensor(source: Source, expected: bool, reason: str) -> Guard:
    """Return a guard on whether a value is a tensor."""
    return Guard(Applied(_ISINSTANCE, (source, Known(Tensor))), Truth(expected), reason)


def in_evaluation(module: str, reason: str) -> Guard:
    """Return a guard on the mode of a module inside, by its qualified name, "" for itself: it is in evaluation."""
    return Guard(attribute_at(qualified(module, "training")), Truth(False), reason)


# -- checks in the middle of a graph ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """Say in a graph whether a guard holds where its arguments, of these names, are values that the graph computed."""

    guard: Guard
    names: tuple[str, ...]
    operator: ClassVar[str] = "condition"
    __name__: ClassVar[str] = "condition"

    def __call__(self, *values: Any) -> bool:
        return self.guard.holds(dict(zip(self.names, values, strict=True)))


@dataclass(slots=True)
class Tally:
    """Count how often a check of a decision by data was made, and how often it missed; all tallies are equal."""

    checks: int = field(default=0, compare=False)
    misses: int = field(default=0, compare=False)

    def __hash__(self) -> int:
        return hash(Tally)

    def is_hopeless(self) -> bool:
        """Tell, every 16 misses, whether more than half of the checks since the last time missed."""
        if self.misses < _WINDOW:
            return False
        mostly = 2 * self.misses > self.checks
        self.checks = self.misses = 0
        return mostly


_WINDOW = 16


class GuardMiss(Exception):
    """An assumption about an intermediate value does not hold; the captured forward catches it and starts over."""

    def __init__(self, reason: str, tally: Tally | None = None) -> None:
        super().__init__(reason)
        self.tally = tally


def require(value: Any, expected: Any, reason: str, restart: bool | Kept = True, tally: Tally | None = None) -> None:
    """Check, in the middle of a graph, that `value` is still what a decision was based on; booleans are its truth.
    Raises GuardMiss if the module may start over (`restart`, or what takes changes back), else GuardError. `tally`
    counts the checks of data.
    """
    if tally is not None:
        tally.checks += 1
    if isinstance(expected, bool):
        same = value is not None and bool(value) is expected  # at capture it was something
    elif expected is None:
        same = value is None
    else:
        same = value == expected
    if same:
        return
    if tally is not None:
        tally.misses += 1
    if isinstance(restart, Kept):
        restart.restore()
    if restart:
        raise GuardMiss(reason, tally)
    raise GuardError(f"{reason}; the value is now {value!r}. Give example_inputs that cover this case too")

"""What guards look at: arguments, what is reached or computed from them; how code spells it, and how it is read."""

from __future__ import annotations

import enum
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, cast

from ...compat import operator_format
from .outside import cells_of, globals_of
from .spelling import attribute_text, told_name, written

__all__ = [
    "SELF", "TOLD", "Applied", "Argument", "Attribute", "Constant", "Dictionary", "Globals", "Item", "Known", "Method",
    "Read", "Source", "Term", "Writer", "attribute_at", "children_of", "constant", "is_outside", "is_training",
    "item_of", "key_of", "length_of", "module_at", "reader", "type_of",
]  # fmt: skip

Read = Callable[["Source"], Any]
"""Gives the value of a source in one call."""


class Writer(Protocol):
    """Write sources as Python."""

    def __call__(self, source: Source) -> str:
        """Return an expression for the value of a source."""
        ...

    def name(self, value: object, /) -> str:
        """Return the name that code has for an object."""
        ...


class Term:
    """A value made of sources."""

    __slots__ = ()
    __match_args__: tuple[str, ...] = ()

    @property
    def parts(self) -> list[Source]:
        """Return the sources that it is made of directly, in the order in which they are read."""
        found: list[Source] = []
        for name in self.__match_args__:
            value = getattr(self, name)
            if isinstance(value, Source):
                found.append(value)
            elif type(value) is tuple:
                found += [v for v in cast("tuple[Any, ...]", value) if isinstance(v, Source)]
        return found

    def _made_over(self, replaced: Mapping[Source, Source]) -> Self:
        if not self.parts:
            return self
        return type(self)(*(_over(getattr(self, name), replaced) for name in self.__match_args__))


def _over(value: Any, replaced: Mapping[Source, Source]) -> Any:
    if isinstance(value, Source):
        return value.over(replaced)
    if type(value) is tuple:
        return tuple(_over(item, replaced) for item in cast("tuple[Any, ...]", value))
    return value


class Source(Term, ABC):
    """Something that can be read when a forward is called; `str` gives it as people read it."""

    __slots__ = ()

    @abstractmethod
    def text(self, write: Writer) -> str:
        """Return Python that reads it."""

    @abstractmethod
    def read(self, read: Read) -> Any:
        """Return its value, given what reads its parts."""

    def display_name(self, write: Writer) -> str:
        """Return what people call it."""
        return self.text(write)

    def over(self, replaced: Mapping[Source, Source]) -> Source:
        """Return the source with others in the place of some that it is made of, or is."""
        found = replaced.get(self)
        return self._made_over(replaced) if found is None else found

    def all(self) -> Iterator[Source]:
        """Yield itself and all that it is made of."""
        yield self
        for part in self.parts:
            yield from part.all()

    def __str__(self) -> str:
        return self.display_name(TOLD)


@dataclass(frozen=True, slots=True)
class Argument(Source):
    """An argument of the forward; the module itself is the argument `self`."""

    name: str

    def text(self, write: Writer) -> str:
        return self.name

    def read(self, read: Read) -> Any:
        return read(self)


@dataclass(frozen=True, slots=True)
class Constant(Source):
    """A plain value; `constant` makes it. Those with one spelling are equal: 1, 1.0 and True are three."""

    spelling: str
    value: Any = field(compare=False)

    def text(self, write: Writer) -> str:
        return written(self.value, write.name) or self.spelling

    def read(self, read: Read) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class Known(Source):
    """An object that is known by its name, such as a builtin type."""

    value: Any

    def text(self, write: Writer) -> str:
        return write.name(self.value)

    def read(self, read: Read) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class Globals(Source):
    """The globals of a module of Python."""

    owner: str

    def text(self, write: Writer) -> str:
        if self.owner in sys.modules:
            return write.name(globals_of(self.owner))
        return f"{write.name(globals_of)}({self.owner!r})"

    def display_name(self, write: Writer) -> str:
        return f"globals of {self.owner}"

    def read(self, read: Read) -> Any:
        return globals_of(self.owner)


@dataclass(frozen=True, slots=True)
class Attribute(Source):
    """An attribute of something."""

    owner: Source
    name: str

    def text(self, write: Writer) -> str:
        return attribute_text(_owner(self.owner, write), self.name)

    def read(self, read: Read) -> Any:
        return getattr(read(self.owner), self.name)


@dataclass(frozen=True, slots=True)
class Dictionary(Source):
    """The attributes that an object holds itself; a class may have a slow way of reading attributes of its own."""

    owner: Source

    def text(self, write: Writer) -> str:
        return f"{write.name(object.__getattribute__)}({write(self.owner)}, '__dict__')"

    def display_name(self, write: Writer) -> str:
        return f"{write(self.owner)}.__dict__"

    def read(self, read: Read) -> Any:
        return object.__getattribute__(read(self.owner), "__dict__")


@dataclass(frozen=True, slots=True)
class Item(Source):
    """An item of something: a tuple, a dictionary, a shape."""

    owner: Source
    key: Source

    def text(self, write: Writer) -> str:
        return f"{_owner(self.owner, write)}[{write(self.key)}]"

    def display_name(self, write: Writer) -> str:
        match self:
            case Item(Dictionary(owner) | Attribute(owner, "_modules"), Constant(value=str() as name)):
                return f"{write(owner)}[{name}]" if name.isdecimal() else attribute_text(write(owner), name)
            case Item(Globals(), Constant(value=str() as name)):
                return name
            case _:
                return self.text(write)

    def read(self, read: Read) -> Any:
        return read(self.owner)[read(self.key)]


@dataclass(frozen=True, slots=True)
class Applied(Source):
    """What a function gives: `len`, `type`, a question about a mode of torch, an operator."""

    function: Callable[..., Any]
    args: tuple[Source, ...]

    def text(self, write: Writer) -> str:
        form = operator_format(self.function)
        parts = [write(argument) for argument in self.args]
        if form is None:
            return f"{write.name(self.function)}({', '.join(parts)})"
        return f"({form.format(*(f'({part})' if part.startswith('-') else part for part in parts))})"

    def read(self, read: Read) -> Any:
        return self.function(*map(read, self.args))


@dataclass(frozen=True, slots=True)
class Method(Source):
    """What a method gives."""

    owner: Source
    name: str
    args: tuple[Source, ...]

    def text(self, write: Writer) -> str:
        return f"{_owner(self.owner, write)}.{self.name}({', '.join([write(argument) for argument in self.args])})"

    def read(self, read: Read) -> Any:
        return getattr(read(self.owner), self.name)(*map(read, self.args))


def _owner(source: Source, write: Writer) -> str:
    text = write(source)
    return f"({text})" if isinstance(source, Constant) else text  # no number takes a dot


SELF = Argument("self")


def reader(names: Mapping[str, Any]) -> Read:
    """Return what reads sources in a call whose arguments (and `self`) are `names`."""

    def read(source: Source) -> Any:
        return names[source.name] if isinstance(source, Argument) else source.read(read)

    return read


def length_of(source: Source) -> Source:
    """Return the number of items of something."""
    return Applied(len, (source,))


def type_of(source: Source) -> Source:
    """Return the class of something."""
    return Applied(type, (source,))


def item_of(source: Source, key: Any) -> Source:
    """Return an item of something, by a plain key or a member of an enumeration."""
    return Item(source, Known(key) if isinstance(key, enum.Enum) else key_of(key))


def is_training(source: Source) -> bool:
    """Say whether a source is the mode of a module."""
    return isinstance(source, Attribute) and source.name == "training"


def is_outside(source: Source) -> bool:
    """Say whether a source is a global, what a forward closes over or an attribute of a class."""
    match source:
        case Globals():
            return True
        case Applied(function):
            return function is cells_of
        case Attribute(Applied(function), name):
            return function is type and not name.startswith("__")
        case _:
            return False


def children_of(source: Source) -> Source:
    """Return the registry of a module's children."""
    return Attribute(source, "_modules")


def module_at(path: Iterable[str], root: Source = SELF) -> Source:
    """Return the module that names lead to from another one."""
    for name in path:
        root = item_of(children_of(root), name)
    return root


def attribute_at(target: str) -> Source:
    """Return an attribute of a module, or of one inside it, by its qualified name."""
    *parents, name = target.split(".")
    return Attribute(module_at(parents), name)


def constant(value: Any) -> Constant | None:
    """Return a plain value, or a short container of such, as a source; None for what has no spelling."""
    spelling = written(value, told_name)
    if spelling is None:
        return None
    return Constant(spelling, deepcopy(value) if type(value) in (list, dict, set, tuple) else value)


def key_of(value: Any) -> Constant:
    """Return a text, a number, a flag, None or a tuple of such as a source."""
    return Constant(repr(value), value)


class _Told:
    """Write sources for people."""

    def __call__(self, source: Source) -> str:
        return source.display_name(self)

    def name(self, value: object) -> str:
        return told_name(value)


TOLD = _Told()
"""Writes what people read."""

"""Note what a traced forward reads from, and sets on, the user's objects outside the modules, by whatever name."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from types import FrameType, MethodType
from typing import Any, NamedTuple, cast

from .class_cache import cached_by_class
from .guards import Equals, Guard, Truth, equal
from .outside_places import MISSING, Place, attributes_of, class_attribute, held, holds_attributes, own_method
from .sources import Attribute, Call, Source, item_of, key_of, length_of

__all__ = ["OutsideObjects", "is_watchable"]

_CONTAINERS = frozenset((list, tuple, dict, set, OrderedDict))
_LONGEST = 64
"""Items of a container that are watched."""
_MOST_ITEMS = 1000
"""Items of a container that are put back, where the forward changes it."""
_DEEPEST = 3
"""Containers in containers that are looked into."""
_MADE_IN_PYTHON = 1 << 9
"""The flag `Py_TPFLAGS_HEAPTYPE`."""
_PACKAGE = __name__.partition(".")[0]
_KINDS: tuple[Any, ...] = (OrderedDict, dict, list, tuple, set)


@cached_by_class
def is_watchable(cls: type) -> bool:
    """Say whether values of a class may hold what is the user's."""
    return cls in _CONTAINERS or holds_attributes(cls)


class _Watched(NamedTuple):
    """An object or a container, how a guard reads it, what people call it, and what it held at first.

    Attributes:
        around: a condition on the list that it is in: a loop may go over that.
    """

    value: Any
    expression: Source
    told: str
    around: Guard | None
    attributes: dict[str, Any]
    items: Any


class OutsideObjects:
    """Watch objects while a forward is traced: their classes are lent methods that tell what is read and set.

    Args:
        note: is told how a guard reads a value, the value, and what people call it; says whether it is guarded.
        keep: is told a condition.
        note_set: is told the owner and name of an attribute that is about to be set, and what people call it.
    """

    def __init__(
        self,
        note: Callable[[Source, Any, str], bool],
        keep: Callable[[Guard], object],
        note_set: Callable[[Any, str, str, bool], None],
    ) -> None:
        self._note, self._keep, self._note_set = note, keep, note_set
        self._watched: dict[int, _Watched] = {}
        self._lent: dict[type, dict[str, Any]] = {}
        self._is_open = False

    def add(self, value: Any, expression: Source, told: str) -> None:
        """Watch a value if it is an object of the user's, and what is in it if it is a container."""
        if id(value) not in self._watched and is_watchable(cast("type[Any]", type(value))):
            self._add(value, expression, told, None, _DEEPEST)

    def _add(self, value: Any, expression: Source, told: str, around: Guard | None, depth: int) -> None:
        cls = cast("type[Any]", type(value))
        is_object = cls not in _CONTAINERS
        attributes, items = attributes_of(value) if is_object else {}, _shallow(value)
        self._watched[id(value)] = _Watched(value, expression, told, around, attributes, items)
        if is_object and self._is_open:
            self._lend(cls)
        for key, part in _items_of(value) if depth else ():
            if is_watchable(cast("type[Any]", type(part))) and id(part) not in self._watched:
                around = None
                if not isinstance(value, dict):
                    around = equal(length_of(expression), len(value), f"{told} has {len(value)} items")
                self._add(part, item_of(expression, key), f"{told}[{key!r}]", around, depth - 1)

    @contextmanager
    def watching(self) -> Generator[None]:
        """Note what is read and set inside."""
        self._is_open = True
        try:
            for watched in list(self._watched.values()):
                if type(watched.value) not in _CONTAINERS:
                    self._lend(cast("type[Any]", type(watched.value)))
            yield
        finally:
            self._is_open = False
            while self._lent:
                cls, own = self._lent.popitem()
                for name, method in own.items():
                    type.__delattr__(cls, name) if method is MISSING else type.__setattr__(cls, name, method)

    def _lend(self, cls: type[Any]) -> None:
        """Have a class tell what is read and set; those that cannot are read now, as a whole."""
        if cls in self._lent:
            return
        methods: dict[str, Any] = {
            "__getattribute__": self._reader(cls),
            "__setattr__": self._setter(cls.__setattr__),
            "__delattr__": self._setter(cls.__delattr__),
        }
        self._lent[cls] = own = {}
        if not cls.__flags__ & _MADE_IN_PYTHON:
            for watched in list(self._watched.values()):
                if type(watched.value) is cls:
                    self._note_all(watched)
            return
        for name, method in methods.items():
            own[name] = vars(cls).get(name, MISSING)
            method.fxopt_original = own_method(cls, name)
            type.__setattr__(cls, name, method)

    def _reader(self, cls: type[Any]) -> Any:
        read: Any = cls.__getattribute__

        def __getattribute__(owner: Any, name: str) -> Any:  # noqa: N807
            watched = self._watched.get(id(owner))
            if watched is None or (name[:2] == "__" and name != "__dict__"):
                return read(owner, name)
            try:
                value = read(owner, name)
            except AttributeError:
                self._note_absent(watched, name)
                raise
            if name != "__dict__":
                self._note_read(watched, name, value)
            elif not _is_own(sys._getframe(1)):  # pyright: ignore[reportPrivateUsage]
                self._note_all(watched)
            return value

        return __getattribute__

    def _setter(self, change: Any) -> Any:
        def __setattr__(owner: Any, name: str, *value: Any) -> None:  # noqa: N807
            watched = self._watched.get(id(owner))
            if watched is not None and not _is_computed(cast("type[Any]", type(owner)), name):
                told = f"{watched.told}.{name}"
                is_guarded = self._note(Attribute(watched.expression, name), held(owner, name), told)
                self._note_set(owner, name, told, is_guarded)
            change(owner, name, *value)

        return __setattr__

    def _note_read(self, watched: _Watched, name: str, value: Any) -> None:
        cls = cast("type[Any]", type(watched.value))
        if isinstance(value, MethodType) or _is_computed(cls, name):
            return
        expression, told = Attribute(watched.expression, name), f"{watched.told}.{name}"
        if watched.around is not None:
            self._keep(watched.around)
        self._note(expression, value, told)
        self.add(value, expression, told)

    def _note_all(self, watched: _Watched) -> None:
        if hasattr(watched.value, "__dict__"):
            names = list(object.__getattribute__(watched.value, "__dict__"))
            held_names = Call(tuple, (Attribute(watched.expression, "__dict__"),))
            self._keep(Guard(held_names, Equals(key_of(tuple(names))), f"{watched.told} has {len(names)} attributes"))
        for name, value in attributes_of(watched.value).items():
            self._note_read(watched, name, value)

    def _note_absent(self, watched: _Watched, name: str) -> None:
        cls = cast("type[Any]", type(watched.value))
        if hasattr(cls, "__getattr__") or class_attribute(cls, name) is not MISSING:
            return
        has = Call(hasattr, (watched.expression, key_of(name)))
        self._keep(Guard(has, Truth(False), f"{watched.told} has no {name}"))

    def put_back(self) -> list[str]:
        """Put back what was changed, also what nobody told of; return names of it."""
        changed: list[str] = []
        for watched in self._watched.values():
            changed += _restored_attributes(watched)
            now = _shallow(watched.value)
            if watched.items is not None and not _is_same(watched.items, now):
                changed.append(watched.told)
                _refill(watched.value, watched.items)
        return changed


def _is_own(frame: FrameType) -> bool:
    """Say whether code of this package asks, to see what an object holds."""
    return frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE


def _is_computed(cls: type[Any], name: str) -> bool:
    """Say whether reading or setting an attribute runs code of its class, whose own reads count."""
    on_class = class_attribute(cls, name)
    kind = cast("type[Any]", type(on_class))
    return isinstance(on_class, property) or (hasattr(kind, "__set__") and bool(kind.__flags__ & _MADE_IN_PYTHON))


def _kind_of(value: Any) -> Any:
    """Return which container a value is, past a class of the user's; None for no container."""
    return next((kind for kind in _KINDS if isinstance(value, kind)), None)


def _is_table(kind: Any) -> bool:
    return kind in (dict, OrderedDict)


def _items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the items of a short container, each with its key, if `[key]` gives them without code of the user's."""
    kind = _kind_of(value)
    if kind in (None, set) or len(value) > _LONGEST or type(value).__getitem__ is not kind.__getitem__:
        return []
    pairs = cast("Iterable[tuple[Any, Any]]", kind.items(value) if _is_table(kind) else enumerate(kind.__iter__(value)))
    return [(key, item) for key, item in pairs if type(key) in (int, str)]


def _shallow(value: Any) -> Any:
    """Return a copy of what a container that can change holds, past all methods of a class of the user's."""
    kind = _kind_of(value)
    if kind in (None, tuple) or kind.__len__(value) > _MOST_ITEMS:
        return None
    return dict(kind.items(value)) if _is_table(kind) else kind(kind.__iter__(value))


def _is_same(before: Any, now: Any) -> bool:
    """Say whether a container holds the very same as before."""
    if now is None or isinstance(before, set):
        return before == now
    if isinstance(before, dict):
        one, other = cast("dict[Any, Any]", before), cast("dict[Any, Any]", now)
        return list(map(id, one)) == list(map(id, other)) and _is_same(list(one.values()), list(other.values()))
    return list(map(id, before)) == list(map(id, now))


def _refill(value: Any, items: Any) -> None:
    kind = _kind_of(value)
    kind.clear(value)
    if not _is_table(kind):
        (list.extend if kind is list else set.update)(value, items)
        return
    for key, item in items.items():
        kind.__setitem__(value, key, item)


def _restored_attributes(watched: _Watched) -> list[str]:
    """Put back the attributes of an object; return names of those that were changed."""
    now = attributes_of(watched.value) if type(watched.value) not in _CONTAINERS else {}
    names = [name for name in {**watched.attributes, **now} if _differ(watched.attributes, now, name)]
    for name in names:
        Place(watched.value, name).put(watched.attributes.get(name, MISSING))
    return [f"{watched.told}.{name}" for name in names]


def _differ(one: dict[str, Any], other: dict[str, Any], name: str) -> bool:
    return one.get(name, MISSING) is not other.get(name, MISSING)

"""Take back what a forward did to the objects it was given (a cache that grew), so that it can start over.
A graph that changes them notes before what is in them, and one that only calls such modules subscribes to their notes.
Code without a graph notifies subscribers, which note everything.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from functools import lru_cache
from typing import Any, TypeAlias, cast

import torch

from .dynamic import cached_by_class
from .generators import RandomState
from .objects import copied_object, makes_objects, parts_of, state_of
from .signature import Absent

__all__ = [
    "Kept", "Path", "announce_changes", "changed_paths", "contents", "graft", "keep", "put_members_back",
    "same_members",
]  # fmt: skip

Path: TypeAlias = "tuple[str | int, ...]"
"""Where something is in an object: the names of attributes, the keys and the places of items."""

_Steps: TypeAlias = "tuple[tuple[str | int, _Steps], ...]"
"""Paths that begin alike, joined: each step with those that follow; none stand for all that is there."""

_DEPTH = 8
_EMPTY = frozenset(
    (torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, bool, int, float, str, bytes, type(None), type)
)
"""Types of values that hold nothing, as most that objects hold."""


def same_members(container: Any, copy: Any) -> bool:
    """Compare a container with a copy, members by identity: they may be tensors, whose `==` is no answer."""
    if len(container) != len(copy):
        return False
    if not copy:
        return True
    kind = cast("type[object]", type(container))
    if issubclass(kind, dict):
        return all(map(operator.is_, container.values(), copy.values())) and all(map(operator.is_, container, copy))
    if issubclass(kind, set):
        return set(map(id, container)) == set(map(id, copy))
    return all(map(operator.is_, container, copy))


def put_members_back(container: Any, copy: Any) -> None:
    """Let a list, deque, dictionary or set hold what a copy of it holds."""
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(copy)


class Kept:
    """Hold what some containers and objects contained."""

    # dictionaries of modules, with the name of an attribute and its value
    attributes: tuple[tuple[dict[str, Any], str, Any], ...] = ()
    random: RandomState | None = None  # the state of the random generators, where that was noted
    notes: tuple[Kept, ...] = ()  # what others have noted for this one since
    wanted: tuple[Any, ...] = ()  # what is to be noted once something is announced: objects and paths, as for `keep`

    def __init__(self) -> None:
        self.containers: list[Any] = []
        self.contents: list[Any] = []

    def hold(self, value: Any, steps: _Steps) -> None:
        """Note the contents of a container or object, and of what some steps lead to in it; of all without steps."""
        if not steps:
            self.hold_all(value)
            return
        containers = _containers(value)
        for container in containers:
            self.containers.append(container)
            self.contents.append(container.copy())
        for step, further in steps:
            part = _at(containers, step)
            if type(part) not in _EMPTY:
                self.hold(part, further)

    def hold_all(self, value: Any, depth: int = _DEPTH) -> None:
        """Note the contents of a container or object, and of those in it."""
        for container in _containers(value):
            held = container.copy()
            self.containers.append(container)
            self.contents.append(held)
            for part in cast("list[Any]", held if isinstance(held, list) else held.values()):
                if depth and type(part) not in _EMPTY:
                    self.hold_all(part, depth - 1)

    def restore(self) -> None:
        """Put everything back."""
        for later in reversed(self.notes):
            later.restore()
        for container, held in zip(self.containers, self.contents, strict=True):
            put_members_back(container, held)
        for holder, name, value in self.attributes:
            if value is Absent:
                holder.pop(name, None)
            else:
                holder[name] = value
        if self.random is not None:
            self.random.restore()


class _Subscriptions(threading.local):
    """Know who in this thread subscribes to notes; those whose forwards have ended are gone."""

    subscribers: tuple[weakref.ref[Kept], ...] = ()


_subscriptions = _Subscriptions()


def keep(
    *kept: Any, random: bool = False, attributes: Iterable[tuple[Any, str]] = (), subscribes: bool = False
) -> Kept:
    """Note, in a graph, what is in objects that it is going to change: objects and paths follow `kept` in turn.
    `attributes`: `__setattr__` methods of modules, and names. `subscribes`: only what called modules announce counts.
    """
    compiling = torch.compiler.is_compiling()
    found = Kept()
    if subscribes and not compiling:
        found.wanted = kept
        _subscriptions.subscribers = (
            *(subscriber for subscriber in _subscriptions.subscribers if subscriber() is not None),
            weakref.ref(found),
        )
        return found
    if attributes:
        found.attributes = tuple(_attribute(setter, name) for setter, name in attributes)
    if random:
        found.random = RandomState()
    _hold(found, kept)
    if not compiling:
        _notify(found, _subscriptions.subscribers)
    return found


def announce_changes() -> None:
    """Say that objects may be changed by what notes nothing before; subscribers note everything now."""
    if torch.compiler.is_compiling() or not _subscriptions.subscribers:
        return
    subscribers, _subscriptions.subscribers = _subscriptions.subscribers, ()
    for subscriber in subscribers:
        found = subscriber()
        if found is not None:
            _notify(_hold(Kept(), found.wanted), (subscriber,))


def _notify(found: Kept, subscribers: tuple[weakref.ref[Kept], ...]) -> None:
    for subscriber in subscribers:
        notified = subscriber()
        if notified is not None:
            notified.notes += (found,)


def _hold(found: Kept, kept: tuple[Any, ...]) -> Kept:
    for place in range(0, len(kept), 2):
        found.hold(kept[place], _steps(kept[place + 1]))
    return found


def _attribute(setter: Any, name: str) -> tuple[dict[str, Any], str, Any]:
    """Return where a module keeps an attribute, given its `__setattr__`, and what is there."""
    own = setter.__self__.__dict__
    holder = own["_buffers"] if name in own["_buffers"] else own
    return holder, name, holder.get(name, Absent)


@lru_cache(maxsize=4096)
def _steps(paths: tuple[Path, ...]) -> _Steps:
    """Return the first steps of paths, each with those that follow; none where a path ends."""
    if () in paths:
        return ()
    firsts = dict.fromkeys(path[0] for path in paths)
    return tuple((first, _steps(tuple(path[1:] for path in paths if path[0] == first))) for first in firsts)


def _at(containers: list[Any], step: str | int) -> Any:
    """Return what is at a step in what holds the parts of a value; None if nothing is."""
    found: Any = None
    for container in containers:
        if not isinstance(container, list):
            found = container.get(step, found)
        elif isinstance(step, int) and step < len(cast("list[Any]", container)):
            found = cast("list[Any]", container)[step]
    return found


def _holders(root: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what holds something in `root`, itself first, with the paths there."""
    if len(path) <= _DEPTH and _containers(root):
        yield path, root
        for step, part in parts_of(root):
            if isinstance(step, (str, int)):
                yield from _holders(part, (*path, step))


def changed_paths(root: Any, before: Mapping[Path, Any]) -> list[Path]:
    """Return the paths to what holds something else than `before`, which `contents` gave for the same object."""
    now = contents(root)
    changed = [path for path, held in before.items() if now.get(path) != held]
    return [path for path in changed if not any(path[: len(other)] == other for other in changed if other != path)]


def contents(root: Any) -> dict[Path, Any]:
    """Return what each holder in an object holds, as something that can be compared; tensors count by identity."""
    return {path: [state_of(container, depth=1) for container in _containers(held)] for path, held in _holders(root)}


def graft(mine: Any, before: Any, after: Any) -> None:
    """Change `mine`, a twin of `before`, as `before` was changed to become `after`; what was not is left alone."""
    for own, old, new in zip(_containers(mine), _containers(before), _containers(after), strict=False):
        if isinstance(own, dict):
            _graft_mapping(cast("dict[Any, Any]", own), old, new)
        elif len(old) == len(new) == len(own):
            for index, pair in enumerate(zip(old, new, strict=True)):
                own[index] = _grafted(own[index], *pair)
        else:
            own[:] = [_grafted(None, None, item) for item in new]


def _graft_mapping(own: dict[Any, Any], old: Mapping[Any, Any], new: Mapping[Any, Any]) -> None:
    for key, value in new.items():
        own[key] = _grafted(own.get(key), old.get(key), value)
    for key in old.keys() - new.keys():
        own.pop(key, None)


def _grafted(mine: Any, before: Any, after: Any) -> Any:
    if state_of(before) == state_of(after):
        return mine
    if type(mine) is type(after) and _containers(mine):
        graft(mine, before, after)
        return mine
    return copied_object(after) if _containers(after) else after


def _containers(value: object) -> list[Any]:
    """Return what holds the parts of a value: the dictionary of an object, a list or dictionary itself."""
    is_object, is_container = _ways_of_holding(type(value))
    if is_object:
        return [vars(value), value] if is_container else [vars(value)]
    return [value] if is_container else []


@cached_by_class
def _ways_of_holding(kind: type) -> tuple[bool, bool]:
    """Say whether values of a type hold others as objects do, and whether they are containers."""
    return makes_objects(kind), issubclass(kind, (list, MutableMapping))

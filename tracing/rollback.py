"""Take back what a forward did to the objects it was given (a cache that grew), so that it can start over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from functools import lru_cache
from typing import Any, TypeAlias, cast

import torch

from .generators import RandomState
from .objects import copied_object, makes_objects, state_of

__all__ = ["Kept", "Path", "changed_paths", "contents", "graft", "keep"]

Path: TypeAlias = "tuple[str | int, ...]"
"""Where something is in an object: the names of attributes, the keys and the places of items."""

_DEPTH = 8
_MISSING: Any = object()
_EMPTY = frozenset(
    (torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, bool, int, float, str, bytes, type(None), type)
)
"""Types of values that hold nothing, as most that objects hold."""


class Kept:
    """Hold what some containers and objects contained."""

    __slots__ = ("_attributes", "_copies", "_random")

    def __init__(self) -> None:
        self._copies: list[tuple[Any, Any]] = []
        self._random: RandomState | None = None
        self._attributes: list[tuple[dict[str, Any], str, Any]] = []

    def hold_attribute(self, setter: Any, name: str) -> None:
        """Note an attribute of a module, given by its `__setattr__`."""
        own = setter.__self__.__dict__
        holder = own["_buffers"] if name in own["_buffers"] else own
        self._attributes.append((holder, name, holder.get(name, _MISSING)))

    def hold_random_state(self) -> None:
        """Note the state of the random generators."""
        self._random = RandomState()

    def step(self, holder: Any, step: str | int) -> Any:
        """Note the contents of one container or object, and return what is at a step in it; None if nothing is."""
        found: Any = None
        for container in _containers(holder):
            self._copies.append((container, container.copy()))
            if not isinstance(container, list):
                found = container.get(step, found)
            elif isinstance(step, int) and step < len(cast("list[Any]", container)):
                found = cast("list[Any]", container)[step]
        return found

    def hold_all(self, value: Any, depth: int = _DEPTH) -> None:
        """Note the contents of a container or object, and of those in it."""
        for container in _containers(value):
            held = container.copy()
            self._copies.append((container, held))
            for part in cast("list[Any]", held if isinstance(held, list) else held.values()):
                if depth and type(part) not in _EMPTY:
                    self.hold_all(part, depth - 1)

    def restore(self) -> None:
        """Put everything back."""
        for container, held in self._copies:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(held)
        for holder, name, value in self._attributes:
            if value is _MISSING:
                holder.pop(name, None)
            else:
                holder[name] = value
        if self._random is not None:
            self._random.restore()


def keep(*kept: Any, random: bool = False, attributes: Iterable[tuple[Any, str]] = ()) -> Kept:
    """Note, in a graph, what is in the objects that it is going to change.

    Args:
        kept: an object and paths in it, again and again; what leads to a path and what lies under it is noted.
        random: note the random state, too.
        attributes: the `__setattr__` of modules, and names of attributes to note.
    """
    found = Kept()
    for setter, name in attributes:
        found.hold_attribute(setter, name)
    if random:
        found.hold_random_state()
    for root, paths in zip(kept[::2], kept[1::2], strict=True):
        for path in paths:
            holder = root
            for step in path:
                holder = found.step(holder, step)
            found.hold_all(holder)
    return found


def _holders(root: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what holds something in `root`, itself first, with the paths there."""
    if len(path) <= _DEPTH and _containers(root):
        yield path, root
        for step, part in _parts(root):
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


@lru_cache(maxsize=4096)
def _ways_of_holding(kind: type) -> tuple[bool, bool]:
    """Say whether values of a type hold others as objects do, and whether they are containers."""
    return makes_objects(kind), issubclass(kind, (list, MutableMapping))


def _parts(value: object) -> list[tuple[str | int, Any]]:
    parts: list[tuple[Any, Any]] = []
    for container in _containers(value):
        listed = isinstance(container, list)
        parts += enumerate(cast("list[Any]", container)) if listed else container.items()
    return [(key, item) for key, item in parts if isinstance(key, (str, int))]

"""Take back what a forward did to the objects it was given (a cache that grew), so that it can start over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias, cast

from .objects import copied_object, is_object, state_of

__all__ = ["Kept", "Path", "changed_paths", "contents", "graft", "keep"]

Path: TypeAlias = "tuple[str | int, ...]"
"""Where something is in an object: the names of attributes, the keys and the places of items."""

_DEPTH = 8


class Kept:
    """Hold what some containers and objects contained."""

    __slots__ = ("_copies",)

    def __init__(self) -> None:
        self._copies: list[tuple[Any, Any]] = []

    def hold(self, value: Any) -> None:
        """Note the contents of one container or object, not of those in it."""
        self._copies.extend((container, container.copy()) for container in _containers(value))

    def hold_all(self, value: Any, depth: int = _DEPTH) -> None:
        """Note the contents of a container or object, and of those in it."""
        self.hold(value)
        if depth:
            for _, part in _parts(value):
                self.hold_all(part, depth - 1)

    def restore(self) -> None:
        """Put everything back."""
        for container, copy in self._copies:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(copy)


def keep(*kept: Any) -> Kept:
    """Note, in a graph, what is in the objects that it is going to change.

    Args:
        kept: an object and paths in it, again and again; what leads to a path and what lies under it is noted.
    """
    found = Kept()
    for root, paths in zip(kept[::2], kept[1::2], strict=True):
        for path in paths:
            holder = root
            for step in path:
                found.hold(holder)
                holder = _part(holder, step)
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
    found: list[Any] = [vars(value)] if is_object(value) else []
    return [*found, cast("Any", value)] if isinstance(value, (list, MutableMapping)) else found


def _parts(value: object) -> list[tuple[str | int, Any]]:
    parts: list[tuple[Any, Any]] = []
    for container in _containers(value):
        listed = isinstance(container, list)
        parts += enumerate(cast("list[Any]", container)) if listed else container.items()
    return [(key, item) for key, item in parts if isinstance(key, (str, int))]


def _part(holder: object, step: str | int) -> Any:
    """Return what is at a step, or None where this object has no such place."""
    return dict(_parts(holder)).get(step)

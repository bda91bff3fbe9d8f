"""Find where an object keeps what a read of its attribute gives: its dictionary is asked in a tenth of the time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

__all__ = ["DirectRead", "DirectReads"]


@dataclass(frozen=True)
class DirectRead:
    """Say where a value is kept.

    Attributes:
        key: in the object's dictionary.
        missing: what must not be in the dictionary for that to be so.
    """

    key: str
    missing: frozenset[str]


class DirectReads:
    """Ask a twin of an object, whose dictionary holds marks, which of them a read of an attribute gives.

    So it does not matter that a class has a `__getattribute__` of its own, or that a property gives another attribute.

    Args:
        cls: the class of the object.
        held: its dictionary.
    """

    def __init__(self, cls: Any, held: Mapping[str, Any]) -> None:
        self._cls: Any = cls
        self._marks = {key: _Mark(key) for key in held}
        self._found: dict[str, DirectRead | None] = {}

    def of(self, name: str) -> DirectRead | None:
        """Return where reads of an attribute end, or None where that cannot be said."""
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> DirectRead | None:
        held, between = _Asked(self._marks), _on_class(cast("type", self._cls), name)
        if not isinstance(between, property) and hasattr(cast("object", type(between)), "__set__"):
            return None
        try:
            twin: Any = object.__new__(self._cls)
            object.__setattr__(twin, "__dict__", held)
            read: Callable[[Any, str], Any] = self._cls.__getattribute__
            found = read(twin, name)
        except Exception:  # a class may do anything with marks; its attributes are read as they are then
            return None
        if type(found) is not _Mark or held.asked & (self._marks.keys() - {found.key}):
            return None
        if isinstance(between, property) and not _only_reads(between, found.key):
            return None
        return DirectRead(found.key, frozenset(held.asked - {found.key}))


def _on_class(cls: type, name: str) -> Any:
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _only_reads(between: property, key: str) -> bool:
    """Say whether a property names one attribute, and nothing else that could decide what it gives."""
    code = getattr(between.fget, "__code__", None)
    return code is not None and code.co_names == (key,) and not code.co_freevars


class _Mark:
    """Stand for a value in a dictionary."""

    __slots__ = ("key",)

    def __init__(self, key: str) -> None:
        self.key = key


class _Asked(dict[str, Any]):
    """Note which keys Python code asks for; Python's own look-up of an attribute is not seen."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        super().__init__(items)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(cast("str", key))
        return super().__contains__(key)


def _refuse(*_: Any) -> Any:
    raise TypeError("the keys are asked for one by one")


for _name in (
    "__delitem__ __eq__ __ior__ __iter__ __len__ __ne__ __or__ __reversed__ __setitem__ "
    "clear copy items keys pop popitem setdefault update values"
).split():
    setattr(_Asked, _name, _refuse)

"""See what a forward may read from, and what it changes on, classes of the user's, under whatever name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

from .outside_places import MISSING, Place, class_attribute, held, is_readable
from .reached_code import codes_in, is_of_user
from .sources import SELF, Attribute, Source, type_of

__all__ = ["OutsideClasses"]


class OutsideClasses:
    """Hold what classes of the user's are now, those that code names and those of the objects that it names.

    Args:
        note: is told how a guard reads a value, the value, and what people call it.
    """

    def __init__(self, note: Callable[[Source, Any, str], bool]) -> None:
        self._note = note
        self._expressions: dict[type[Any], Source] = {}
        self._before: dict[int, tuple[type[Any] | ModuleType, dict[str, Any]]] = {}

    def add(self, cls: type[Any], expression: Source) -> None:
        """Look at a class too, which a guard reads by an expression, if it is the user's."""
        if cls not in self._expressions and is_of_user(cls):
            self._expressions[cls] = expression
            self._keep(cls, vars(cls))

    def note_renamed(self, owner: Any, expression: Source, told: str, code: CodeType) -> None:
        """Note what code may read from a class, or a module of Python, that it gives another name to."""
        if isinstance(owner, (type, ModuleType)) and is_readable(owner):
            names = {name for inner in codes_in(code) for name in inner.co_names}
            self._keep(owner, names if isinstance(owner, ModuleType) else vars(owner))
            for name in names:
                value = held(owner, name)
                if value is not MISSING:
                    self._note(Attribute(expression, name), value, f"{told}.{name}")

    def note_class_methods(self, functions: Iterable[FunctionType], own: type[Any]) -> None:
        """Note what class methods may read from their class.

        Args:
            functions: all that the forward may run.
            own: the class of the module.
        """
        owners: dict[str, list[type[Any]]] = {}
        for cls in (own, *self._expressions):
            for base in cls.__mro__:
                owners.setdefault(base.__qualname__, []).append(cls)
        for function in functions:
            owner, _, name = function.__qualname__.rpartition(".")
            for cls in owners.get(owner, ()):
                if _is_class_method(cls, name, function):
                    expression = self._expressions.get(cls, type_of(SELF))
                    self.note_renamed(cls, expression, cls.__qualname__, function.__code__)

    def _keep(self, owner: type[Any] | ModuleType, names: Iterable[str]) -> None:
        """Keep some of what an owner holds now, to be put back."""
        if id(owner) not in self._before:
            self._before[id(owner)] = owner, {name: vars(owner).get(name, MISSING) for name in names}

    def put_back(self) -> list[str]:
        """Put back what was changed; return names of it."""
        changed: list[str] = []
        for owner, before in self._before.values():
            now = vars(owner)
            names = {**before, **now} if isinstance(owner, type) and len(now) != len(before) else before
            for name in names:
                value = before.get(name, MISSING)
                if now.get(name, MISSING) is not value and not name.startswith("__"):
                    changed.append(f"{owner.__name__}.{name}")
                    Place(owner, name).put(value)
        return changed


def _is_class_method(cls: type[Any], name: str, function: FunctionType) -> bool:
    found = class_attribute(cls, name)
    return isinstance(found, classmethod) and cast("Any", found).__func__ is function

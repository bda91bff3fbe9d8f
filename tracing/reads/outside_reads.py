"""See which plain values a forward reads from outside the modules: globals, what it closes over, class attributes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from ...runtime.guards import (
    LIBRARIES,
    SELF,
    Attribute,
    Call,
    Globals,
    Guard,
    Source,
    cells_of,
    constant,
    exactly,
    item_of,
    own_cells,
    type_of,
)
from ..examples import Untraceable
from .bytecode import Read, Value, Variable, is_class, named_in
from .outside_stores import display_name, stored_outside
from .reached_code import class_attribute, is_foreign, reached_functions, value_of

__all__ = ["OutsideReads", "guards_on"]


class OutsideReads:
    """Hold what a forward, and functions that it names, read from outside the modules; Untraceable if they set it."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._class = module, type(module)
        self._guards: dict[Guard, None] = {}
        self._cells = {id(cell): key for key, cell in own_cells(type(module).forward).items()}
        for function, names in reached_functions([module], hooks=False):
            stored = stored_outside(function, module)
            if stored is not None:
                raise Untraceable(f"it sets a value outside the module: {stored[0]}", stored[1])
            for value, content in names:
                if not _is_constant(function, value):
                    self._note(self._source(function, value), content, display_name(value))
            self._note_attributes(_read_of_class(function.__code__))

    def guards(self, read: Iterable[str]) -> Iterator[Guard]:
        """Yield conditions under which the same is read again, and `read` attributes if the module's class has them."""
        self._note_attributes(name for name in read if name not in vars(self._module))
        yield from self._guards

    def _note_attributes(self, names: Iterable[str]) -> None:
        """Note that attributes of the module's class are read, those of its own or of a base."""
        for name in names:
            self._note(Attribute(type_of(SELF), name), class_attribute(self._class, name), f"{name} of its class")

    def _note(self, source: Source | None, value: Any, display_name: str) -> None:
        for guard in () if source is None else guards_on(source, value, display_name):
            self._guards.setdefault(guard)

    def _source(self, function: FunctionType, value: Value) -> Source | None:
        """Return how a guard reads a value, or None if it cannot, or if the value is of no code of the user's."""
        if isinstance(value, Read):
            owner = value_of(function, value.owner)
            if isinstance(owner, (type, ModuleType)) and is_foreign(getattr(owner, "__module__", owner.__name__)):
                return None  # what torch, say, holds is no user's
            source = self._source(function, value.owner)
            return None if source is None else Attribute(source, value.name)
        if not isinstance(value, Variable):
            return None
        if value.kind == "global":
            namespace = _owner_of(function.__globals__) if value.name in function.__globals__ else None
            return None if namespace is None else item_of(Globals(namespace), value.name)
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index(value.name)]
        key = self._cells.get(id(cell))
        return None if key is None else Attribute(item_of(Call(cells_of, (SELF,)), key), "cell_contents")


def _is_constant(function: FunctionType, value: Value) -> bool:
    """Say whether a name in installed code is written in capitals: nobody sets it."""
    return isinstance(value, (Variable, Read)) and value.name.isupper() and LIBRARIES in function.__code__.co_filename


@functools.lru_cache(maxsize=4096)
def _read_of_class(code: CodeType) -> frozenset[str]:
    """Return the names of what code reads of the class of an argument: that may be the module."""
    return frozenset(value.name for value in named_in(code) if isinstance(value, Read) and is_class(value.owner))


def _owner_of(space: dict[str, Any]) -> str | None:
    """Return the name of the loaded module of Python that has these globals, so that a guard can look there."""
    namespace = space.get("__name__")
    return (
        namespace
        if isinstance(namespace, str) and getattr(sys.modules.get(namespace), "__dict__", None) is space
        else None
    )


def guards_on(source: Source, value: Any, display_name: str) -> list[Guard]:
    """Return guards on a plain value, or a short container of such, called `display_name`; none for any other."""
    if constant(value) is None and type(value) is not float:
        return []  # no code of the user's is asked for the text of any other
    return exactly(source, value, f"{display_name} is {value!r}")

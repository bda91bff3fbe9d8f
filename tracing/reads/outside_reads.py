"""See which plain values a forward reads from outside the modules, and tell from code what it may set there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from ...runtime.guards import (
    LIBRARIES,
    SELF,
    Applied,
    Attribute,
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
from .bytecode import Read, Use, Value, Variable, is_class, named_in, uses_in
from .reached_code import MISSING, class_attribute, held, is_foreign, is_outside, reached_functions, value_of

__all__ = ["OutsideReads", "display_name", "guards_on", "stored_outside"]


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
        return None if key is None else Attribute(item_of(Applied(cells_of, (SELF,)), key), "cell_contents")


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


_OWNERS = {"STORE_ATTR": -1, "DELETE_ATTR": -1, "STORE_SUBSCR": 1, "DELETE_SUBSCR": 0, "STORE_SLICE": 1}
"""What sets a part of something -> where that is among what it takes."""
_VARIABLES = {"STORE_GLOBAL": "global", "DELETE_GLOBAL": "global", "STORE_DEREF": "cell", "DELETE_DEREF": "cell"}
_CHANGING = frozenset("add append clear discard extend insert pop popitem remove setdefault update".split())
"""Methods of lists, dictionaries and sets that change them."""
_CONTAINERS = (list, dict, set)


class _Store(NamedTuple):
    """A line that may set a variable, or an attribute or item of an owner, or call what would change a container."""

    owner: Value
    name: str
    line: int
    is_variable: bool = False
    by_method: bool = False


def stored_outside(function: FunctionType, module: nn.Module) -> tuple[str, str] | None:
    """Return what a function that a module's forward runs may set that is not the module's, and the line; or None."""
    for store in _stores(function.__code__):
        if _is_made_outside(store, function, module):
            what = display_name(store.owner) + (f".{store.name}" if store.name else "")
            return what, f"{Path(function.__code__.co_filename).name}:{store.line}"
    return None


def display_name(value: Value) -> str:
    """Return what people call a value."""
    if isinstance(value, Read):
        return f"{display_name(value.owner)}.{value.name}"
    return value.name if isinstance(value, Variable) else "its class"


@functools.lru_cache(maxsize=4096)
def _stores(code: CodeType) -> tuple[_Store, ...]:
    return tuple(store for use in uses_in(code) if (store := _store(use)) is not None)


def _store(use: Use) -> _Store | None:
    if use.operation in _VARIABLES:
        return _Store(Variable(_VARIABLES[use.operation], use.argument), "", use.line, is_variable=True)
    if use.operation in _OWNERS:
        name = use.argument if use.operation.endswith("_ATTR") else ""
        return _Store(use.taken[_OWNERS[use.operation]], name, use.line)
    is_method = use.operation in ("LOAD_ATTR", "LOAD_METHOD") and use.argument in _CHANGING
    return _Store(use.taken[0], "", use.line, by_method=True) if is_method else None


def _is_made_outside(store: _Store, function: FunctionType, module: nn.Module) -> bool:
    if store.is_variable:
        return is_outside(store.owner, function.__code__)
    content = _content(store.owner, function, module)
    return isinstance(content, _CONTAINERS) if store.by_method else content is not MISSING


def _content(value: Value, function: FunctionType, module: nn.Module) -> Any:
    """Return what a value is that is not the module's; `MISSING` for any other. Local variables may be the module."""
    if is_class(value):
        return type(module)
    if is_outside(value, function.__code__):
        return value_of(function, value)
    if not isinstance(value, Read):
        return MISSING
    if isinstance(value.owner, Variable) and not is_outside(value.owner, function.__code__):
        return MISSING if value.name in vars(module) else class_attribute(type(module), value.name)
    owner = _content(value.owner, function, module)
    return MISSING if owner is MISSING else held(owner, value.name)

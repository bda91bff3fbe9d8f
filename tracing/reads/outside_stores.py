"""Tell from code what it may set outside of the modules: globals, what it closes over, parts of these."""

from __future__ import annotations

import functools
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from .bytecode import Read, Use, Value, Variable, is_class, uses_in
from .reached_code import MISSING, class_attribute, held, is_outside, value_of

__all__ = ["display_name", "stored_outside"]

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

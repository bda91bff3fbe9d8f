"""Find, without running it, the functions that a module's forward may run: those it names, and those they name."""

from __future__ import annotations

import builtins
import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

from torch import nn

from ...compat import has_hooks, hooks_of
from ...runtime.values import all_inside, user_class
from .bytecode import Plain, Read, Value, Variable, named_in, root_of

__all__ = ["MISSING", "Reached", "class_attribute", "held", "is_foreign", "is_outside", "reached_functions", "value_of"]

MISSING: Any = object()
"""Stands for what there is not."""
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "fxopt"}
"""Packages whose code is not looked into: it asks no module for its class, and what it reads is no user's."""
_METHODS: Any = (FunctionType, MethodType, property, staticmethod, classmethod)
_CALLABLE: Any = (FunctionType, MethodType, functools.partial)
_BUILTINS: Mapping[str, Any] = vars(builtins)


class Reached(NamedTuple):
    """A function that may run, and what outside of it its code names, with the value now, `MISSING` if unknown."""

    function: FunctionType
    names: list[tuple[Value, Any]]


def reached_functions(modules: Sequence[nn.Module], *, hooks: bool = True) -> Iterator[Reached]:
    """Yield each function that calling `modules` may run, but for the forwards of those inside, nearest first. These
    are their forwards, `hooks` (and a `__call__` of their own), what they name, and methods that they name of the
    modules inside. What is called in other ways is not found.
    """
    methods: Mapping[str, list[Any]] | None = None
    pending = deque(_entries(modules, hooks))
    seen: set[int] = set()
    while pending:
        function = _function_of(pending.popleft())
        if function is None or id(function) in seen or is_foreign(function.__module__ or ""):
            continue
        seen.add(id(function))
        outside, attributes = _names(function.__code__)
        reached = Reached(function, [(value, value_of(function, value)) for value in outside])
        yield reached
        methods = _methods(modules) if methods is None else methods
        pending.extend(value for _, value in reached.names if isinstance(value, _CALLABLE))
        pending.extend(method for name in attributes & methods.keys() for method in methods[name])


def _entries(modules: Sequence[nn.Module], hooks: bool) -> Iterator[Any]:
    """Yield what calling modules runs; what those of a class have in common comes once."""
    for cls in dict.fromkeys(map(type, modules)):
        yield from (vars(base).get("forward") for base in user_class(cls).__mro__)  # `super().forward(x)`
        if hooks:
            yield cls.__call__
    for module in modules:
        if "forward" in module.__dict__:
            yield module.__dict__["forward"]
        if hooks and has_hooks(module):
            yield from hooks_of(module)


def _function_of(value: Any) -> FunctionType | None:
    """Return the function under a method, property or `functools.partial`."""
    while not isinstance(value, FunctionType):
        name = next((name for name in ("__func__", "fget", "func") if hasattr(value, name)), None)
        if name is None or isinstance(value, type):
            return None
        value = getattr(value, name)
    return value


def _methods(modules: Iterable[nn.Module]) -> dict[str, list[Any]]:
    """Return name -> methods of the modules inside some, and functions that these hold."""
    found: dict[str, dict[int, Any]] = {}
    inside = all_inside(modules)
    bases = {base: None for cls in dict.fromkeys(map(type, inside)) for base in cls.__mro__}
    spaces = [vars(base) for base in bases if base is not object and not is_foreign(base.__module__)]
    for space in (*spaces, *(module.__dict__ for module in inside)):
        for name, value in space.items():
            if isinstance(value, _METHODS) and name != "forward" and not name.startswith("__"):
                found.setdefault(name, {})[id(value)] = value
    return {name: list(values.values()) for name, values in found.items()}


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[list[Value], frozenset[str]]:
    """Return what code names that is outside of it, and the names of all attributes that it reads."""
    named = named_in(code)
    outside = [value for value in named if is_outside(root_of(value), code)]
    return outside, frozenset(value.name for value in named if isinstance(value, Read))


def is_outside(value: Value, code: CodeType) -> bool:
    """Say whether a value is a global, or a variable that a function closes over."""
    return isinstance(value, Variable) and (value.kind == "global" or value.name in code.co_freevars)


def is_foreign(module: str) -> bool:
    """Say whether a module of Python, by its name, is one whose code is not looked into."""
    return module.partition(".")[0] in _FOREIGN


def value_of(function: FunctionType, value: Value) -> Any:
    """Return what a name stands for in a function now, running no code of the user's; `MISSING` if that is unknown."""
    if isinstance(value, Read):
        owner = value_of(function, value.owner)
        return MISSING if owner is MISSING else held(owner, value.name)
    if isinstance(value, Plain):
        return value.value
    if not isinstance(value, Variable):
        return MISSING
    if value.kind == "builtin":
        return _BUILTINS[value.name]
    if value.kind == "global":
        return function.__globals__.get(value.name, _BUILTINS.get(value.name, MISSING))
    return _content(function, value.name)


def _content(function: FunctionType, name: str) -> Any:
    names = function.__code__.co_freevars
    try:
        return (function.__closure__ or ())[names.index(name)].cell_contents if name in names else MISSING
    except ValueError:  # not filled yet
        return MISSING


def held(owner: Any, name: str) -> Any:
    """Return an attribute of a module of Python, a class or an object, running no code of the user's."""
    if isinstance(owner, ModuleType):
        return vars(owner).get(name, MISSING)
    if isinstance(owner, type):
        return class_attribute(owner, name)
    on_class = class_attribute(cast("type[Any]", type(owner)), name)
    if isinstance(on_class, MemberDescriptorType):
        return on_class.__get__(owner) if hasattr(owner, name) else MISSING
    attributes: Mapping[str, Any] = getattr(owner, "__dict__", {})
    return on_class if hasattr(cast("object", type(on_class)), "__set__") else attributes.get(name, on_class)


def class_attribute(cls: type[Any], name: str) -> Any:
    """Return what a class, or a base of it, has as an attribute; `MISSING` where it has none."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), MISSING)

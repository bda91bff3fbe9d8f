"""Find, without running it, the functions that a module's forward may run, and whether they may ask for exact classes.

A module that a pass rewrote has a class of its own, derived from the user's and named like it. What asks `isinstance`,
or for the name of a class, cannot tell the difference; what compares classes, or looks things up by them, can.
"""

from __future__ import annotations

import builtins
import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

from torch import nn

from ...compat import has_hooks, hooks_of
from ...runtime.values import all_inside, user_class
from .bytecode import TYPE, Asked, Display, Plain, Read, Use, Value, Variable, named_in, root_of, uses_in

__all__ = [
    "MISSING", "Reached", "checks_exact_types", "class_attribute", "held", "is_foreign", "is_outside",
    "reached_functions", "value_of",
]  # fmt: skip


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
    """Yield each function that calling `modules` may run, but for the forwards of those inside, nearest first: their
    forwards, `hooks` and own `__call__`, what these name, and the methods of modules inside that they name.
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


_BY_TEXT = (repr, print, issubclass)
"""What may be called with a class, besides `str` and errors: a subclass of the same name makes no difference to it."""
_TOLD = frozenset(("__name__", "__qualname__", "__module__", "__doc__"))
"""What a class that was made on the fly has in common with the user's."""


def checks_exact_types(modules: Sequence[nn.Module]) -> str:
    """Return where the code that calling `modules` runs, but for the forwards of those inside, may ask for a class."""
    return next((place for reached in reached_functions(modules) if (place := _place(reached))), "")


def _place(reached: Reached) -> str:
    """Return the first line of a function that may ask a module for its class, or nothing."""
    function, names = reached
    code, types = function.__code__, frozenset((TYPE, *(name for name, value in names if value is type)))
    asking = (use for use, place in _questions(code, types) if not _is_harmless(function, use, place))
    return next((f"{Path(code.co_filename).name}:{use.line}" for use in asking), "")


@lru_cache(maxsize=4096)
def _questions(code: CodeType, types: frozenset[Value]) -> list[tuple[Use, int]]:
    """Return the steps that take the class of something, or `type` itself, which has these names, and where."""
    taken = ((use, place, value) for use in uses_in(code) for place, value in enumerate(use.taken))
    return [
        (use, place) for use, place, value in taken if (value.function if isinstance(value, Asked) else value) in types
    ]


def _is_harmless(function: FunctionType, use: Use, place: int) -> bool:
    """Say whether what a step makes of an answer cannot depend on whether a class was made on the fly."""
    if _is_of_constant(use.taken[place]):
        return True
    if use.operation in ("LOAD_ATTR", "LOAD_METHOD"):
        return use.argument in _TOLD or not use.argument.startswith("__")
    is_answer = isinstance(use.taken[place], Asked)
    if use.operation == "CALL":
        called = use.taken[0] or use.taken[1]
        return called is use.taken[place] or _ignores_classes(value_of(function, called), is_answer)
    if use.operation in ("IS_OP", "COMPARE_OP", "CONTAINS_OP", "BINARY_SUBSCR"):
        return _is_of_others(function, use.taken[1 - place])
    return use.operation.startswith("FORMAT_") or (use.operation == "BUILD_TUPLE" and not is_answer)


def _ignores_classes(called: Any, is_answer: bool) -> bool:
    if isinstance(called, type) and issubclass(called, (str, BaseException)):
        return True
    return called in _BY_TEXT or (called is isinstance and not is_answer)


def _is_of_others(function: FunctionType, value: Value) -> bool:
    """Say whether what a class is compared with, or looked up in, has to do with no class of modules."""
    if isinstance(value, Display):
        return all(_is_of_others(function, item) for item in value.items)
    return _is_of_constant(value) or _is_no_module(value_of(function, value))


def _is_of_constant(value: Value) -> bool:
    """Say whether a value is `type("")` or the like."""
    return isinstance(value, Asked) and isinstance(value.argument, Plain)


def _is_no_module(value: Any) -> bool:
    if value is MISSING:
        return False
    if isinstance(value, (tuple, list, set, frozenset, dict)):
        return all(map(_is_no_module, cast("Any", value)))
    if isinstance(value, type):
        return not issubclass(value, nn.Module)
    return value is None or isinstance(value, (bool, int, float, str))

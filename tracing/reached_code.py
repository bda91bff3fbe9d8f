"""Find, without running it, the functions that a module's own forward may run: those it names, and those they name."""

from __future__ import annotations

import dis
import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from ..compat import has_hooks, hooks_of
from .class_cache import cached_by_class
from .dynamic import user_class
from .names import all_inside
from .observe import INTERNAL

__all__ = [
    "TooManyFunctions",
    "codes_in",
    "is_foreign",
    "is_of_user",
    "reached_functions",
    "values_named",
    "variables_in",
]

_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "fxopt"}
"""Packages whose code is not looked into: it asks no module of a user's for its class, and what it reads is no user's.

What these packages hold, and objects of their classes, is for the same reason not guarded.
"""
_PLAIN = frozenset((bool, int, float, str, tuple, list, dict, type(None)))
_FUNCTIONS: Any = (FunctionType, MethodType, functools.partial)
_METHODS: Any = (FunctionType, property, staticmethod, classmethod)
_SPECIAL = frozenset(
    "__call__ __getitem__ __setitem__ __missing__ __contains__ __iter__ __next__ __len__ __bool__ __enter__ __exit__ "
    "__getattr__ __getattribute__".split()
)
"""Methods that code runs without naming them."""
_CONTAINERS = frozenset((list, tuple, dict, set))
_LONGEST = 64
_NO_OBJECTS = (nn.Module, Tensor, type, ModuleType, BaseException)
_MOST = 2000
"""Functions that are looked into; there are a few hundred behind the forward of a large model."""


class TooManyFunctions(Exception):
    """There are more functions than are looked into, so that what the others do is not known."""


def reached_functions(
    modules: Sequence[nn.Module], *, forwards: bool = True, hooks: bool = True
) -> Iterator[FunctionType]:
    """Yield each function that calling `modules` may run, but for the forwards of those inside, nearest first.

    These are their forwards, their hooks, the functions that these name as globals or close over, and the methods of
    that name of the modules inside, of the objects that these hold, and of objects and classes of the user's that are
    named. What is called in other ways is not found.

    Args:
        modules: may be called.
        forwards: or only what runs around their forwards: hooks, and a `__call__` of their own.
        hooks: or only their forwards.

    Raises:
        TooManyFunctions: after 2000 of them, if there are more.
    """
    methods: _Methods | None = None
    pending = deque(_entries(modules, forwards, hooks))
    seen: set[int] = set()
    while pending:
        for function in _functions_of(pending.popleft()):
            if id(function) not in seen and not _is_foreign(function):
                if len(seen) == _MOST:
                    raise TooManyFunctions(f"it may run more than {_MOST} functions")
                seen.add(id(function))
                yield function
                methods = methods or _Methods(modules)
                values = list(values_named(function))
                pending.extend(values)
                pending.extend(methods.named_by(function))
                pending.extend(methods.of_named(values))


def _entries(modules: Sequence[nn.Module], forwards: bool, hooks: bool) -> Iterator[Any]:
    """Yield what calling modules runs; what those of a class have in common comes once."""
    for cls in dict.fromkeys(map(type, modules)):
        if forwards:
            yield from (vars(base).get("forward") for base in user_class(cls).__mro__)  # `super().forward(x)`
        if hooks:
            yield cls.__call__
    for module in modules:
        if forwards and "forward" in module.__dict__:
            yield module.__dict__["forward"]
        if hooks and has_hooks(module):
            yield from hooks_of(module)


def _functions_of(value: Any, depth: int = 4) -> Iterator[FunctionType]:
    """Yield the functions that calling a value runs: its own, what a decorator made it of, what a class starts with."""
    if isinstance(value, FunctionType):
        yield value
        inner = value.__dict__.get("__wrapped__")
    elif isinstance(value, (MethodType, staticmethod, classmethod)):
        inner = cast("Any", value).__func__
    elif isinstance(value, functools.partial):
        inner = cast("Any", value).func
    elif isinstance(value, property):
        inner = value.fget
    elif isinstance(value, type) and not issubclass(value, nn.Module) and not _is_foreign(value):
        for name in ("__init__", "__call__"):
            yield from _functions_of(vars(cast("type[Any]", value)).get(name), depth - 1)
        return
    else:
        inner = getattr(cast("Any", value), "__wrapped__", None) if _may_wrap(value) else None
    if inner is not None and depth:
        yield from _functions_of(inner, depth - 1)


def _may_wrap(value: Any) -> bool:
    """Tell whether a value is something like a memoised function."""
    return callable(value) and not isinstance(value, (nn.Module, type))


def _is_foreign(value: Any) -> bool:
    return is_foreign(getattr(value, "__module__", None) or "")


def is_foreign(module: str) -> bool:
    """Say whether a module of Python, by its name, is one whose code is not looked into."""
    return module.partition(".")[0] in _FOREIGN


@cached_by_class
def is_of_user(cls: type[Any]) -> bool:
    """Say whether a class is the user's, or of a package that is looked into, and its values are plain objects."""
    return not is_foreign(cls.__module__) and not issubclass(cls, _NO_OBJECTS)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield code, and that of the functions made in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes_in(inner)


def _parts(value: Any) -> list[Any]:
    """Return what a container of a few items, or an object, holds."""
    kind = cast("type[Any]", type(value))
    if kind not in _CONTAINERS:
        return list(object.__getattribute__(value, "__dict__").values()) if kind.__dictoffset__ else []
    return list(value.values() if kind is dict else value) if len(value) <= _LONGEST else []


class _Names(NamedTuple):
    variables: frozenset[str]
    attributes: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> _Names:
    """Return the names that code, and functions made in it, have for what is no local variable, and for attributes."""
    steps = [step for inner in codes_in(code) for step in dis.get_instructions(inner)]
    variables = frozenset(step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return _Names(variables, frozenset(step.argval for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD")))


def variables_in(code: CodeType) -> frozenset[str]:
    """Return the names of globals and builtins that code, or a function made in it, reads."""
    return _names_in(code).variables


def values_named(function: FunctionType) -> Iterator[Any]:
    """Yield what a function's code names: globals, what is in modules of such a name, and what it closes over."""
    names = _names_in(function.__code__)
    for name in names.variables:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and not is_foreign(value.__name__):
            inside = map(vars(value).get, names.attributes)
            yield from (found for found in inside if isinstance(found, (FunctionType, type)))
        elif value is not None:
            yield value
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


class _Methods:
    """The methods of the modules in some, of the objects that these hold, and the functions among those, by name.

    Those of objects and classes outside come with the functions that name them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._found: dict[str, dict[int, Any]] = {}
        self._asked: set[str] = set()
        self._outside: set[int] = set()
        classes: dict[type[Any], None] = {}
        for module in all_inside(modules):
            classes[type(module)] = None
            for name, value in module.__dict__.items():
                if name not in INTERNAL and type(value) not in _PLAIN:
                    classes[cast("type[Any]", type(value))] = None
                    self._add_called(name, value)
        for base in {base: None for cls in classes for base in cls.__mro__}:
            if base is not object and not _is_foreign(base):
                self._add_methods(base)

    def _add_called(self, name: str, value: Any) -> None:
        """Note what calling an attribute of a module runs."""
        called = value if isinstance(value, _FUNCTIONS) else _call_of(value)
        if called is not None:
            self._found.setdefault(name, {})[id(called)] = called

    def _add_methods(self, cls: type[Any]) -> None:
        for name, value in list(vars(cls).items()):
            if isinstance(value, _METHODS) and name != "forward" and not name.startswith("__"):
                self._found.setdefault(name, {})[id(value)] = value  # pyright: ignore[reportUnknownArgumentType]

    def named_by(self, function: FunctionType) -> Iterator[Any]:
        """Yield the methods found so far that a function names."""
        names = _names_in(function.__code__).attributes
        self._asked |= names
        for name in names:
            yield from self._found.get(name, {}).values()

    def of_named(self, values: Iterable[Any], depth: int = 3) -> Iterator[Any]:
        """Yield the methods of objects and classes of the user's that the functions seen so far name."""
        for value in values:
            is_class = isinstance(value, type)
            kind = cast("type[Any]", value if is_class else type(value))
            if not (kind in _CONTAINERS or is_of_user(kind)) or id(value) in self._outside:
                continue
            self._outside.add(id(value))
            if kind not in _CONTAINERS:
                yield from self._of_class(kind, is_class)
            if depth and not is_class:
                yield from self.of_named(_parts(value), depth - 1)

    def _of_class(self, cls: type[Any], bound: bool) -> Iterator[Any]:
        """Yield the methods of a class that are named, and remember the others; or only those bound to no object."""
        for base in cls.__mro__:
            if base is object or _is_foreign(base):
                continue
            for name, value in list(vars(base).items()):
                if isinstance(value, (staticmethod, classmethod) if bound else _METHODS):
                    if name in _SPECIAL or (name in self._asked and not name.startswith("__")):
                        yield value
                    if not name.startswith("__"):
                        self._found.setdefault(name, {})[id(value)] = value


def _call_of(value: Any) -> FunctionType | None:
    """Return the `__call__` of an object of a class written in Python."""
    if isinstance(value, (nn.Module, type)):
        return None
    for cls in cast("type[Any]", type(value)).__mro__:
        if "__call__" in vars(cls):
            found = vars(cls)["__call__"]
            return found if isinstance(found, FunctionType) else None
    return None

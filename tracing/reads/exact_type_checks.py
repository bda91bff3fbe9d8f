"""Tell from the code of a forward whether it may ask modules for their exact class: `type(child) is Block`.

A module that a pass rewrote has a class of its own, derived from the user's and named like it. What asks `isinstance`,
or for the name of a class, cannot tell the difference; what compares classes, or looks things up by them, can.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, cast

from torch import nn

from .bytecode import TYPE, Asked, Display, Plain, Use, Value, uses_in
from .reached_code import MISSING, Reached, reached_functions, value_of

__all__ = ["checks_exact_types"]

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

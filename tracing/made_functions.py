"""Functions that a forward has made for it (`mask_function(width)`), and the calls that take them, each one node."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from .proxy import UNKNOWN

if TYPE_CHECKING:
    from .tracer import ModuleTracer

__all__ = ["MadeFunction", "call_whole", "made_function", "takes_functions"]

_MAKERS_OF_MASKS = "transformers.masking_utils"
"""Given a function of positions, these run it under `vmap` and a mode, which no graph can say."""
_PLAIN = (bool, int, float, str, type(None))


class MadeFunction:
    """Be a function that stands inside another one.

    Args:
        module: where the outer function is.
        name: the qualified name of the inner one.
        values: what it closes over.
    """

    def __init__(self, module: str, name: str, values: tuple[Any, ...]) -> None:
        self._made = module, name, values
        outer = _outer(module, name)
        code = None if outer is None else _inner(outer, name)
        if outer is None or code is None or len(code.co_freevars) != len(values):
            raise ImportError(f"{module} has no function {name} any more that closes over {len(values)} values")
        cells = tuple(map(CellType, values))
        self._function = FunctionType(code, outer.__globals__, code.co_name, None, cells)
        self.__name__, self.__module__ = code.co_name, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return MadeFunction, self._made


def _outer(module: str, name: str) -> FunctionType | None:
    try:
        found = operator.attrgetter(name.partition(".<locals>.")[0])(importlib.import_module(module))
    except (AttributeError, ImportError):
        return None
    return found if isinstance(found, FunctionType) else None


def _inner(outer: FunctionType, name: str) -> CodeType | None:
    codes = [value for value in outer.__code__.co_consts if isinstance(value, CodeType)]
    found = [code for code in codes if code.co_qualname == name]
    return found[0] if len(found) == 1 else None


def made_function(function: FunctionType) -> MadeFunction | None:
    """Return what stands for a function that was made inside another one from plain values, or None for any other."""
    try:
        values = tuple(cell.cell_contents for cell in function.__closure__ or ())
    except ValueError:  # a variable of the outer function that has no value yet
        return None
    outer = _outer(function.__module__, function.__qualname__)
    if outer is None or _inner(outer, function.__qualname__) is not function.__code__:
        return None
    if function.__defaults__ or function.__kwdefaults__ or any(type(value) not in _PLAIN for value in values):
        return None
    return MadeFunction(function.__module__, function.__qualname__, values)


def takes_functions(value: object) -> bool:
    """Tell whether a value is a function of a library that is called whole where it is given functions."""
    return type(value) is FunctionType and value.__module__ == _MAKERS_OF_MASKS and value.__name__.startswith("create_")


def call_whole(
    tracer: ModuleTracer, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record a call as one node if it is given functions that a graph can hold; else trace through it."""
    given = [value for value in (*args, *kwargs.values()) if type(value) is FunctionType]
    if not given or any(made_function(value) is None for value in given):
        return function(*args, **kwargs)
    with tracer.session.aside():
        values = tracer.values((args, kwargs))
    if values is UNKNOWN:
        return tracer.add("call_function", function, args, kwargs, UNKNOWN)
    with tracer.session.suspended():
        value = function(*values[0], **values[1])
    return tracer.add("call_function", function, args, kwargs, value, optional=True)

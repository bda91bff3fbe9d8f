"""What guards call to look outside of the modules: the globals of a Python module, and what a forward closes over."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from types import CellType, FunctionType
from typing import Any

from torch import nn

__all__ = ["LIBRARIES", "cells_of", "globals_of", "own_cells"]

LIBRARIES = "site-packages"
"""In the path of installed code: it is full of functions that close over settings which nobody changes."""
_cells: weakref.WeakKeyDictionary[FunctionType, Mapping[str, CellType]] = weakref.WeakKeyDictionary()


def globals_of(module: str) -> dict[str, Any]:
    """Return the globals of a loaded module of Python; raise a KeyError if it is not loaded."""
    return vars(sys.modules[module])


def cells_of(module: nn.Module) -> Mapping[str, CellType]:
    """Return the variables that a module's original forward closes over; see `own_cells`."""
    cls = type(module)
    return own_cells(getattr(cls, "_fxopt_own", cls.forward))


def own_cells(forward: Callable[..., Any]) -> Mapping[str, CellType]:
    """Return what a forward, and those under its decorators, close over, as "0:name" of the outermost; no library's."""
    if not isinstance(forward, FunctionType):
        return {}
    known = _cells.get(forward)
    if known is None:
        known = _cells[forward] = dict(_found(forward))
    return known


def _found(forward: FunctionType) -> list[tuple[str, CellType]]:
    found: list[tuple[str, CellType]] = []
    function: Any = forward
    for depth in range(8):
        if not isinstance(function, FunctionType):
            break
        if LIBRARIES not in function.__code__.co_filename:
            pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            # What `super()` closes over, the class, leads back to the forward, which would be kept for ever.
            found += [(f"{depth}:{name}", cell) for name, cell in pairs if name != "__class__"]
        function = function.__dict__.get("__wrapped__")
    return found

"""Look operators up by name, function, method or class of module; add those of other packages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from ..compat import native_functions, operator_name
from ..errors import UsageError, expect
from .info import UNKNOWN, OpInfo, info_of_schema, registered_operator
from .table import TABLE

__all__ = [
    "NAMESPACES", "Registration", "function_name", "method_name", "operator_info", "operator_of_module",
    "register_operator",
]  # fmt: skip

NAMESPACES: tuple[Any, ...] = (torch, F, torch.special, native_functions())
"""Where functions are found by the names of operators, the first one first."""


class _Table:
    """The rows, and under which names, functions and classes they are found."""

    def __init__(self, rows: Iterable[OpInfo]) -> None:
        self.rows: dict[str, OpInfo] = {}
        self.functions: dict[Any, str] = {}
        self.methods: dict[str, str] = {}
        self.modules: dict[type, str] = {}
        for row in rows:
            self.add(row)

    def add(self, info: OpInfo) -> None:
        if info.name in self.rows:
            raise UsageError(f"operator '{info.name}' is already in the table; describe each operator once")
        for keys, known in self._places(info):
            for key in keys:
                if key in known:
                    raise UsageError(f"operator '{info.name}' cannot have {key!r}: operator '{known[key]}' has it")
        self.rows[info.name] = info
        for keys, known in self._places(info):
            known.update(dict.fromkeys(keys, info.name))

    def remove(self, info: OpInfo) -> None:
        del self.rows[info.name]
        for keys, known in self._places(info):
            for key in keys:
                del known[key]

    def _places(self, info: OpInfo) -> list[tuple[list[Any], dict[Any, str]]]:
        """Return what an operator is found by, and where."""
        methods = [] if info.name == "where" else _spellings(info)  # `x.where` takes its operands in another order
        named = [getattr(namespace, name, None) for name in _spellings(info) for namespace in NAMESPACES]
        functions = dict.fromkeys((*filter(callable, named), *info.functions))
        return [(list(functions), self.functions), (methods, self.methods), (list(info.modules), self.modules)]


def _spellings(info: OpInfo) -> list[str]:
    """Return the names of an operator, those of its in-place forms with them."""
    names = (info.name, *info.aliases)
    return [*names, *(f"{name}_" for name in names if not name.startswith("__"))]


_table = _Table(TABLE)  # made before anything is traced: traces put other functions into the places of torch's


class Registration:
    """An operator that was added to the table; `remove` takes it out again."""

    def __init__(self, info: OpInfo) -> None:
        self._info: OpInfo | None = info

    def remove(self) -> None:
        """Forget the operator; a second call does nothing."""
        if self._info is not None:
            _table.remove(self._info)
            self._info = None


def register_operator(info: OpInfo) -> Registration:
    """Add an operator to the table, for the whole process; what is left out is taken from its schema.

    Register before a model is captured: graphs and plans that exist already do not change.

    Raises:
        UsageError: if the name, a function or a class of modules is already in the table, or `torch.ops` has no such
            operator.
    """
    expect(info, OpInfo, "info", "an fxopt.OpInfo")
    if not info.name:
        raise UsageError("an operator needs a name")
    if "::" in info.name and registered_operator(info.name) is None:
        raise UsageError(f"torch.ops has no operator '{info.name}'; define it before it is described")
    completed = info.completed()
    _table.add(completed)
    return Registration(completed)


def operator_info(name: str | None) -> OpInfo:
    """Return what is known of an operator, by its canonical name; of one of `torch.ops` at least by its schema."""
    if name is None:
        return UNKNOWN
    known = _table.rows.get(name)
    if known is not None:
        return known
    operator = registered_operator(name)
    return UNKNOWN if operator is None else info_of_schema(operator)


def function_name(function: Any) -> str | None:
    """Return the operator that a function computes; None where that is not known."""
    qualified = operator_name(function)
    if qualified is not None:
        short = qualified.removeprefix("aten::")
        return short if short in _table.rows else method_name(short) or qualified
    try:
        return _table.functions.get(function)
    except TypeError:  # it cannot be hashed
        return None


def method_name(method: str) -> str | None:
    """Return the operator that a method of tensors computes; None where that is not known."""
    return _table.methods.get(method)


def operator_of_module(cls: type) -> str | None:
    """Return the operator that modules of exactly this class compute, or None: that of `nn.GELU` is `gelu`."""
    return _table.modules.get(cls)

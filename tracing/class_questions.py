"""Tell from the code of a forward whether it may ask modules for their exact class: `type(child) is Block`.

A module that a pass rewrote has a class of its own, derived from the user's and named like it. What asks `isinstance`,
or for the name of a class, cannot tell the difference; what compares classes, or looks things up by them, can.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

from torch import nn

from .reached_code import TooManyFunctions, codes_in, reached_functions, variables_in

__all__ = ["asks_for_classes"]

_BY_TEXT = frozenset(("str", "repr", "print", "issubclass"))
"""What may be called with a class: it makes no difference to these that it is a subclass of the same name."""
_TOLD = frozenset(("__name__", "__qualname__", "__module__", "__doc__"))
"""What a class that was made on the fly has in common with the user's."""
_UNKNOWN: Any = object()
_BUILTIN: Mapping[str, Any] = vars(builtins)


def asks_for_classes(modules: Sequence[nn.Module], *, forwards: bool = True) -> str:
    """Return where the code that calling `modules` runs, but for the forwards of those inside, may ask for a class.

    Args:
        modules: may be called.
        forwards: or only what runs around their forwards, such as hooks.

    Returns:
        "file.py:12" of the first such line; empty if there is none; why it cannot be told if there is too much code.
    """
    functions = reached_functions(modules, forwards=forwards)
    try:
        return next((place for function in functions if (place := _place(function))), "")
    except TooManyFunctions as error:
        return str(error)


@lru_cache(maxsize=4096)
def _names_class(code: CodeType) -> bool:
    return any("__class__" in inner.co_names for inner in codes_in(code))


@lru_cache(maxsize=4096)
def _spells_class(code: CodeType) -> bool:
    """Say whether code has the text "__class__", as for `getattr`."""
    return any("__class__" in inner.co_consts for inner in codes_in(code))


def _names_of_type(function: FunctionType) -> frozenset[str]:
    """Return the names that a function has for the builtin `type`: of globals, of what it closes over, of defaults."""
    code = function.__code__
    names = {name for name in variables_in(code) if function.__globals__.get(name, _BUILTIN.get(name)) is type}
    names |= {name for name, value in _closed_over(function).items() if value is type}
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    given = {**dict(zip(positional, defaults, strict=True)), **(function.__kwdefaults__ or {})}
    return frozenset(names | {name for name, value in given.items() if value is type})


def _asks_builtins(function: FunctionType) -> bool:
    """Say whether a function may ask by `builtins.type`."""
    code, space = function.__code__, function.__globals__
    if not any(space.get(name) is builtins for name in variables_in(code)):
        return False
    tree = _tree(code)
    return tree is None or any(
        space.get(node.id) is builtins and not _reads_other(_parent(node), node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name)
    )


def _reads_other(parent: Any, node: ast.AST) -> bool:
    """Say whether of `builtins` only something else than `type` is read; `getattr(builtins, name)` may read any."""
    return isinstance(parent, ast.Attribute) and parent.value is node and parent.attr != "type"


def _place(function: FunctionType) -> str:
    """Return the first line of a function that may ask a module for its class, or nothing."""
    code = function.__code__
    if _spells_class(code) or _asks_builtins(function):
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    names = _names_of_type(function)
    if not names and not _names_class(code):
        return ""
    line, tree = code.co_firstlineno, _tree(code)
    questions = [] if tree is None else list(_questions(tree, names))
    if questions:
        use = _Use(function)
        found = next((node.lineno for node in questions if not use.is_harmless(node)), None)
        if found is None:
            return ""
        line += found - 1
    return f"{Path(code.co_filename).name}:{line}"


@lru_cache(maxsize=1024)
def _tree(code: CodeType) -> ast.AST | None:
    """Return the syntax of a function, with parents noted; None where its text cannot be had, or is no whole."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            cast("Any", child).parent = node
    return tree


def _questions(tree: ast.AST, names: Collection[str]) -> Iterator[Any]:
    """Yield where `type`, which has these names, is used, and where `__class__` is read or written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "__class__":
            yield node
        elif isinstance(node, ast.Name) and node.id in names:
            parent = _parent(node)
            is_call = isinstance(parent, ast.Call) and parent.func is node and len(parent.args) == 1
            yield parent if is_call else node


def _parent(node: ast.AST) -> Any:
    return getattr(node, "parent", None)


class _Use:
    """Look at what becomes of an answer.

    Args:
        function: whose globals and closure give names their values.
    """

    def __init__(self, function: FunctionType) -> None:
        self._names = _known_names(function)
        self._plain = _plain_receiver(function)

    def is_harmless(self, node: Any) -> bool:
        """Tell whether no answer to a question can depend on whether a class was made on the fly."""
        parent = _parent(node)
        if isinstance(node, ast.Name):  # not called with one argument
            is_annotation = isinstance(parent, ast.Subscript) and parent.value is node
            call = _parent(parent) if isinstance(parent, ast.Tuple) else parent
            return is_annotation or (
                isinstance(call, ast.Call) and call.func is not node and _calls(call, "isinstance")
            )
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            return False
        asked = node.args[0] if isinstance(node, ast.Call) else node.value
        if isinstance(asked, ast.Constant) or (isinstance(asked, ast.Name) and asked.id == self._plain):
            return True
        return self._is_only_named(node, parent) or self._is_compared_with_others(node, parent) or _is_raised(node)

    def _is_only_named(self, node: ast.AST, parent: Any) -> bool:
        if isinstance(parent, ast.Attribute):
            return isinstance(parent.ctx, ast.Load) and _is_told(parent.attr)
        if isinstance(parent, ast.Call):
            if not parent.args or parent.args[0] is not node:
                return parent.func is node
            return any(_calls(parent, name) for name in _BY_TEXT) or _reads_attribute(parent)
        return isinstance(parent, ast.FormattedValue)

    def _is_compared_with_others(self, node: ast.AST, parent: Any) -> bool:
        """Tell whether a class is compared with, or looked up among, classes that are no modules'."""
        if isinstance(parent, ast.Compare) and len(parent.ops) == 1:
            (other,) = {parent.left, *parent.comparators} - {node}
            return self._is_of_others(other)
        if isinstance(parent, ast.Subscript) and parent.slice is node:
            return self._is_of_others(parent.value)
        if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) and parent.func.attr == "get":
            return parent.args[0] is node and self._is_of_others(parent.func.value)
        return False

    def _is_of_others(self, node: ast.AST) -> bool:
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return all(map(self._is_of_others, node.elts))
        return _is_no_module(self._value(node))

    def _value(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._names.get(node.id, _UNKNOWN)
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            if isinstance(owner, (ModuleType, type)):
                return getattr(owner, node.attr, _UNKNOWN)
        if isinstance(node, ast.Call) and _calls(node, "type") and len(node.args) == 1:
            argument = node.args[0]
            return type(argument.value) if isinstance(argument, ast.Constant) else _UNKNOWN
        return _UNKNOWN


def _known_names(function: FunctionType) -> Mapping[str, Any]:
    """Return the values of the names that a function does not set itself."""
    local = {name for code in codes_in(function.__code__) for name in (*code.co_varnames, *code.co_cellvars)}
    known = {**_BUILTIN, **function.__globals__}
    return {name: value for name, value in {**known, **_closed_over(function)}.items() if name not in local}


def _closed_over(function: FunctionType) -> dict[str, Any]:
    """Return what a function closes over, by name."""
    closed: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            closed[name] = cell.cell_contents
        except ValueError:  # not filled yet
            closed[name] = _UNKNOWN
    return closed


def _plain_receiver(function: FunctionType) -> str:
    """Return what a method calls its object, if it is of a class that is no module's; else nothing."""
    owner, _, name = function.__qualname__.rpartition(".")
    cls = function.__globals__.get(owner)
    is_plain = isinstance(cls, type) and not issubclass(cls, nn.Module) and hasattr(cast("object", cls), name)
    return function.__code__.co_varnames[0] if is_plain and function.__code__.co_argcount else ""


def _is_no_module(value: Any) -> bool:
    """Tell whether a value is no class of modules, nor contains one."""
    if value is _UNKNOWN:
        return False
    if isinstance(value, (tuple, list, set, frozenset, dict)):
        return all(map(_is_no_module, cast("Any", value)))
    if isinstance(value, type):
        return not issubclass(value, nn.Module)
    return value is None or isinstance(value, (bool, int, float, str))


def _reads_attribute(call: ast.Call) -> bool:
    """Tell whether `getattr` or `hasattr` is called with a plain name."""
    name = call.args[1] if len(call.args) > 1 else None
    is_plain = isinstance(name, ast.Constant) and _is_told(str(name.value))
    return is_plain and (_calls(call, "getattr") or _calls(call, "hasattr"))


def _is_told(name: str) -> bool:
    """Tell whether an attribute of a class is also one of a class that was made from it on the fly."""
    return name in _TOLD or not name.startswith("__")


def _calls(call: ast.Call, name: str) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == name


def _is_raised(node: Any) -> bool:
    """Tell whether something is part of an error or of what a failed assertion says."""
    while isinstance(node, ast.expr):
        parent = _parent(node)
        if isinstance(parent, ast.Raise) or (isinstance(parent, ast.Assert) and parent.msg is node):
            return True
        node = parent
    return False

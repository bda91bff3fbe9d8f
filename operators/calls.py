"""What single calls in a graph compute, in whatever spelling: function, method, Python operator, `torch.ops`."""

from __future__ import annotations

import builtins
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import fx

from ..compat import is_registered_operator, native_functions, overloads_of
from ..compat.operators import written_arguments
from .info import Chance, OpInfo, registered_operator
from .registry import NAMESPACES, function_name, method_name, operator_info

__all__ = [
    "canonical_name", "function_of", "function_path", "has_random_effects", "in_place_signature", "info_of",
    "is_known_function", "mutates", "reached", "resolve", "upwards",
]  # fmt: skip

_T = TypeVar("_T")

_IN_PLACE_NAMES = "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor".split()
_IN_PLACE_PYTHON = frozenset(getattr(operator, name) for name in _IN_PLACE_NAMES)
_IN_PLACE_METHODS = frozenset(["__setitem__", "__delitem__", *(f"__{name}__" for name in _IN_PLACE_NAMES)])
_LIBRARY: tuple[Any, ...] = (
    *NAMESPACES, torch.linalg, torch.fft, torch.Tensor, operator, math,
)  # fmt: skip
_BUILTINS = (getattr, len, max, min, abs, int, float, round, tuple, list)
_SETTING = ("set_", "use_", "_assert")
"""How names of torch's functions begin that set or check something."""


def canonical_name(node: fx.Node) -> str | None:
    """Return the operator that a call_function or call_method node computes, or None where it is not known.
    Of an operator of `torch.ops` that is not one of torch's own, it is the qualified name: `"acme::swish"`.
    """
    if node.op == "call_function":
        if node.target is getattr:
            return "shape" if node.args[1:] == ("shape",) else None
        if (named := getattr(type(node.target), "operator", None)) is not None:
            return named
        return "len" if node.target is len else function_name(node.target)
    return method_name(str(node.target)) if node.op == "call_method" else None


def info_of(node: fx.Node) -> OpInfo:
    """Return what is known of the operator that a call_function or call_method node computes."""
    info = operator_info(canonical_name(node))
    return operator_info(info.alone) if info.alone and len(node.args) + len(node.kwargs) == 1 else info


@cache
def function_of(name: str, *, keywords: bool = False) -> Callable[..., Any]:
    """Return the out-of-place function that computes operator `name`; Python's own, where one takes no `keywords`.
    Raises a KeyError if there is no such function.
    """
    functions = operator_info(name).functions
    if functions and not (keywords and functions[0].__module__ == "_operator"):
        return functions[0]
    found = registered_operator(name) if "::" in name else _named(name)
    if found is None:
        raise KeyError(name)
    return found


def _named(name: str) -> Callable[..., Any] | None:
    found = (getattr(namespace, name, None) for namespace in NAMESPACES)
    return next((function for function in found if callable(function)), None)


def is_known_function(function: Any) -> bool:
    """Say whether a function that has no row in the table comes from a place whose functions only compute."""
    name = getattr(function, "__name__", "")
    if function in _BUILTINS:
        return True
    return not name.startswith(_SETTING) and any(getattr(owner, name, None) is function for owner in _LIBRARY)


_PREFIXES: Mapping[str, Any] = {
    "torch": torch, "torch.nn.functional": F, "torch.special": torch.special, "torch._C._nn": native_functions(),
    "operator": operator, "builtins": builtins,
}  # fmt: skip


def function_path(node: fx.Node) -> str | None:
    """Return a name that `resolve` finds the node's function by; methods are called like `.flatten`; else None."""
    if node.op == "call_method":
        return f".{node.target}"
    if is_registered_operator(node.target):
        return str(node.target).replace(".", "::", 1)
    names = (getattr(node.target, "__name__", ""), canonical_name(node) or "")
    for prefix, namespace in _PREFIXES.items():
        for name in names:
            if name and getattr(namespace, name, None) is node.target:
                return f"{prefix}.{name}"
    return None


@cache
def resolve(path: str) -> Callable[..., Any]:
    """Return the function that `function_path` named, or raise a KeyError."""
    prefix, _, name = path.rpartition(".")
    if "::" in path:
        function = registered_operator(path)
    else:
        function = getattr(_PREFIXES[prefix] if prefix else torch.Tensor, name, None)
    if not callable(function):
        raise KeyError(path)
    return function


def mutates(node: fx.Node) -> bool:
    """Say whether a node writes into one of its operands."""
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_METHODS
    if node.op != "call_function":
        return False
    if node.target in (operator.setitem, operator.delitem) or node.target in _IN_PLACE_PYTHON:
        return True
    if is_registered_operator(node.target):
        return _writes_by_schema(node)
    if "out" in node.kwargs or _asks_in_place(node):
        return True
    if "writes" in node.meta:
        return bool(node.meta["writes"])
    name = getattr(node.target, "__name__", "")
    if getattr(operator, name, None) is node.target:
        return False  # `and_` is called so for `and` is a word of Python
    return getattr(node.target, "may_write", False) or (name.endswith("_") and not name.endswith("__"))


def _writes_by_schema(node: fx.Node) -> bool:
    """Say whether one of the overloads that a call of an operator of `torch.ops` may mean writes into an argument."""
    given = {*range(len(node.args)), *node.kwargs}
    return any(not given.isdisjoint(written_arguments(overload)) for overload, _ in overloads_of(node.target))


def _asks_in_place(node: fx.Node) -> bool:
    """Say whether a call passes `inplace=True`, by keyword or by position."""
    asked: Any = node.kwargs.get("inplace", False)
    signature = in_place_signature(node.target)
    if signature is not None:
        place = list(signature.parameters).index("inplace")
        asked = node.args[place] if place < len(node.args) else asked
    return asked is not None and asked is not False


def in_place_signature(function: Any) -> inspect.Signature | None:
    """Return the signature of a function of `torch.nn.functional` with a parameter `inplace`; None for any other."""
    name = getattr(function, "__name__", "")
    return _in_place_signature(name) if getattr(F, name, None) is function else None


@cache
def _in_place_signature(name: str) -> inspect.Signature | None:
    try:
        signature = inspect.signature(getattr(F, name))
    except (TypeError, ValueError):
        return None
    return signature if "inplace" in signature.parameters else None


def has_random_effects(node: fx.Node) -> bool:
    """Say whether a call of a known operator may draw random numbers: dropout at 0, or outside training, does not."""
    info = info_of(node)
    return bool(info.random) and not any(_is_zero(node, chance) for chance in info.chances)


def _is_zero(node: fx.Node, chance: Chance) -> bool:
    name, position, default = chance
    given: Any = node.kwargs.get(name, node.args[position] if len(node.args) > position else default)
    return type(given) in (bool, int, float) and bool(given == 0)


def reached(starts: Iterable[_T], following: Callable[[_T], Iterable[_T]]) -> Iterator[_T]:
    """Yield nodes, or other things, and what is reached from them, each once, the nearest first."""
    found = dict.fromkeys(starts)
    pending = list(found)
    for one in pending:
        yield one
        fresh = [other for other in dict.fromkeys(following(one)) if other not in found]
        found.update(dict.fromkeys(fresh))
        pending += fresh


def upwards(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node and what it is computed from, the nearest first."""
    return reached([node], lambda one: one.all_input_nodes)

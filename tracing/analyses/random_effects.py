"""Which nodes and modules may draw random numbers; what is not known may."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Iterable, Mapping
from types import BuiltinMethodType, CodeType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import fx, nn

from ...compat import all_modules, own_children
from ...operators import has_random_effects, info_of, is_known_function, operator_info, operator_of_module
from ...runtime.guards import require
from ...runtime.values import cached_by_class, is_container, is_leaf, is_library, keep, runs_as_sequential

__all__ = ["function_uses_host_random", "may_draw", "module_may_draw", "tree_uses_host_random"]

_WORDS = ("Attention", "LSTM", "GRU", "RNN", "Transformer")
"""What is in the names of torch's modules that may draw, and compute more than one operator."""
_CHECKS = (bool, slice, setattr, require, keep)
"""What graphs call to decide, set and check; it draws nothing."""


def may_draw(node: fx.Node) -> bool:
    """Tell whether a node that calls no module may draw random numbers."""
    if node.op not in ("call_function", "call_method"):
        return False
    info = info_of(node)
    if info.random is not None:
        return has_random_effects(node)
    if node.op == "call_method":
        name = str(node.target)
        return not hasattr(torch.Tensor, name) and not _only_holds(cast("fx.Node", node.args[0]), name)
    return node.target not in _CHECKS and not is_known_function(node.target)


def _only_holds(owner: fx.Node, method: str) -> bool:
    """Tell whether a method is one of a cache of `transformers` (not of the user's own), or looks into a mapping."""
    kind = owner.meta.get("val")
    if isinstance(kind, dict):
        return method in ("get", "keys", "values", "items")
    return isinstance(kind, type) and kind.__module__ == "transformers.cache_utils"


def module_may_draw(module: nn.Module) -> bool:
    """Tell whether a module itself, and not one inside it, may draw random numbers."""
    if is_container(module) or runs_as_sequential(module):
        return False
    if not is_leaf(module) or not is_library(type(module)):
        return True
    random = operator_info(operator_of_module(type(module))).random
    return any(word in type(module).__name__ for word in _WORDS) if random is None else random


def function_uses_host_random(function: Any) -> bool:
    """Tell whether a function that is not torch's, or one in its file, draws from Python's generator or numpy's."""
    if not isinstance(function, FunctionType) or function.__module__.startswith("torch."):
        return False
    return _any_uses_host_random([function, *inspect.unwrap(function).__globals__.values()])


def tree_uses_host_random(module: nn.Module) -> bool:
    """Tell whether a module or one inside it may draw from Python's generator or numpy's."""
    if not own_children(module):
        return _class_uses_host_random(type(module))
    return any(map(_class_uses_host_random, {type(inner) for inner in all_modules(module)}))


@cached_by_class
def _class_uses_host_random(cls: type) -> bool:
    """Tell whether a method of a class, or a function in its files, draws from Python's generator or numpy's."""
    bases = [base for base in cls.__mro__ if not base.__module__.startswith(("torch.", "builtins"))]
    owners = {base.__module__ for base in bases if base.__module__ in sys.modules}
    return _any_uses_host_random(
        value for space in (*bases, *map(sys.modules.get, owners)) for value in list(vars(space).values())
    )


def _any_uses_host_random(values: Iterable[Any]) -> bool:
    names: dict[int, tuple[frozenset[str], frozenset[str]]] = {}
    for value in list(values):
        held = getattr(value, "fget", None) if isinstance(value, property) else getattr(value, "__func__", value)
        function = inspect.unwrap(held) if isinstance(held, FunctionType) else None
        if isinstance(function, FunctionType):
            space = function.__globals__
            if id(space) not in names:
                names[id(space)] = _generators(space)
            if _uses(function.__code__, *names[id(space)]):
                return True
    return False


def _generators(namespace: Mapping[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    """Return by which names functions of a file find something to draw with, and by which numpy."""
    numpy = sys.modules.get("numpy")
    numpy_random = None if numpy is None else numpy.random
    kinds = (random.Random,) if numpy_random is None else (random.Random, numpy_random.RandomState)
    sources: set[str] = set()
    numpys: set[str] = set()
    for name, value in list(namespace.items()):
        bound = isinstance(value, (BuiltinMethodType, MethodType)) and isinstance(value.__self__, kinds)
        if value is random or bound or (value is numpy_random and value is not None):
            sources.add(name)
        elif value is numpy and value is not None:
            numpys.add(name)
    return frozenset(sources), frozenset(numpys)


def _uses(code: CodeType, sources: frozenset[str], numpys: frozenset[str]) -> bool:
    """Tell whether code, or code within it, names what it could draw with."""
    names = code.co_names
    if not sources.isdisjoint(names) or ("random" in names and not numpys.isdisjoint(names)):
        return True
    return any(_uses(inner, sources, numpys) for inner in code.co_consts if isinstance(inner, CodeType))

"""Nested arguments and results: rebuilt with other tensors in them, and their leaves by path."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from .objects import copied_object, is_namedtuple, is_object, parts_of
from .plain_types import PLAIN_TYPES

__all__ = [
    "Arguments", "TensorFunction", "aliased", "are_plain", "copied", "flatten", "map_leaves", "map_tensors", "plain",
    "requires_grad", "structure",
]  # fmt: skip


Arguments: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"
"""Positional and keyword arguments of one call."""
TensorFunction: TypeAlias = Callable[[Tensor], Tensor]


def map_tensors(function: Callable[[Tensor], Any], value: Any, within: Callable[[Tensor], Any] | None = None) -> Any:
    """Return `value` rebuilt with `function` of each tensor in it (`within` objects, another); a repeat stays one."""
    if type(value) is Tensor:  # as most values are
        return function(value)
    done: dict[int, Any] = {}
    done_within = done if within is None else dict[int, Any]()

    def change(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return done[id(leaf)] if id(leaf) in done else done.setdefault(id(leaf), function(leaf))
        return copied_object(leaf, within or function, done_within) if is_object(leaf) else leaf

    return map_leaves(change, value)


def requires_grad(value: object) -> TypeGuard[Tensor]:
    """Tell whether a value is a tensor that gradients flow to."""
    return isinstance(value, Tensor) and value.requires_grad


def are_plain(values: Iterable[object]) -> TypeGuard[Iterable[Tensor]]:
    """Tell whether all values are tensors, and of no class of their own."""
    return set(map(type, values)) <= _PLAIN


_PLAIN = {Tensor}


def copied(value: Any) -> Any:
    """Return `value` with copies of its tensors, free of any autograd graph, and of the objects in it."""
    return map_tensors(_copy, value)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def aliased(value: Any) -> Any:
    """Return `value` with other tensors on the same memory, so that giving one another shape leaves `value` alone."""
    return map_tensors(_alias, value, _copy)


def _alias(tensor: Tensor) -> Tensor:
    return _copy(tensor) if type(tensor) is not Tensor or tensor.is_inference() else tensor.detach()


_LEAVES = frozenset((Tensor, nn.Parameter, fx.Node, *PLAIN_TYPES))
"""What is in most containers."""


def map_leaves(function: Callable[[Any], Any], value: Any, leaf: type | None = None) -> Any:
    """Return `value` rebuilt with `function` of everything in it that is no container, or that is a `leaf`.
    Containers are those of Python, mappings, dataclasses and slices. Lists and dictionaries of torch.fx become plain.
    """
    kind = cast("Any", type(value))
    if kind in _LEAVES or (leaf is not None and issubclass(kind, leaf)):
        return function(value)
    if kind is tuple:
        return tuple([map_leaves(function, item, leaf) for item in value])
    if kind is list or kind is immutable_list:
        return [map_leaves(function, item, leaf) for item in value]
    if kind is dict or kind is immutable_dict:
        return {key: map_leaves(function, item, leaf) for key, item in value.items()}
    return _rebuild(function, value, lambda item: map_leaves(function, item, leaf))


def _rebuild(function: Callable[[Any], Any], value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of a rarer kind with `change` of what is in it; of anything else `function`."""
    if isinstance(value, slice):
        limits = cast("slice[Any, Any, Any]", value)
        return slice(*map(change, (limits.start, limits.stop, limits.step)))
    if isinstance(value, tuple):
        items = cast("tuple[Any, ...]", value)
        return _rebuild_tuple(items, list(map(change, items)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _rebuild_dataclass(cast("Any", value), change)
    if isinstance(value, MutableMapping):
        items = cast("MutableMapping[Any, Any]", value)
        new = copy.copy(items)
        new.update({key: change(item) for key, item in items.items()})  # registers refuse others item by item
        return new
    if isinstance(value, list):
        copied = copy.copy(cast("list[Any]", value))
        copied[:] = map(change, copied)
        return copied
    return function(value)


def _rebuild_tuple(value: tuple[Any, ...], items: list[Any]) -> Any:
    """Rebuild named tuples, which take fields, and `torch.Size` and torch's results, which take one sequence."""
    try:
        return type(value)(*items) if is_namedtuple(value) else type(value)(items)
    except TypeError:
        return tuple(items)


def _rebuild_dataclass(value: Any, function: Callable[[Any], Any]) -> Any:
    new: Any = copy.copy(value)
    held = cast("dict[str, Any]", value) if isinstance(value, dict) else dict[str, Any]()
    for name in [field.name for field in dataclasses.fields(new)]:
        item = getattr(new, name)
        mapped = function(item)
        if mapped is not item:
            object.__setattr__(new, name, mapped)
            if name in held:
                dict.__setitem__(new, name, mapped)
    return new


_ATOMS: tuple[type, ...] = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType, torch.dtype, torch.device, torch.layout, torch.Generator, nn.Module,
)  # fmt: skip


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of `value` (tensors, numbers, strings, None) by their path: `[0].logits`."""
    return {where: leaf for where, leaf, is_leaf in _walk(value, path) if is_leaf}


def structure(value: Any) -> tuple[tuple[str, str], ...]:
    """Return the shape of `value` without its leaves' values: every path, and the type found there."""
    return tuple((where, type(item).__name__) for where, item, _ in _walk(value, ""))


def plain(value: Any) -> Any:
    """Return a value as tuples, lists and dictionaries: a dataclass as its fields, as a `.pt2` file gives it."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list):
        return [plain(item) for item in cast("list[Any]", value)]
    return tuple(plain(item) for item in cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any, bool]]:
    steps = _steps(value)
    yield path, value, not steps
    for step, item in steps:
        yield from _walk(item, path + step)


def _steps(value: object) -> list[tuple[str, Any]]:
    """Return the parts of a value, each with how it is written after the value: `.logits`, `[0]`."""
    if isinstance(value, (Tensor, set, *_ATOMS)):
        return []
    keyed = isinstance(value, (Mapping, tuple, list)) and not is_namedtuple(cast("object", value))
    # Libraries' objects that are no `objects`, too: torch's distributions, say.
    held = cast("Any", value)
    parts = parts_of(held) or list(getattr(held, "__dict__", {}).items())
    return [(f"[{step!r}]" if keyed else f".{step}", item) for step, item in parts]

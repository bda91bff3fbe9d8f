"""Values with tensors in them: walk them, map them, and name the tensors inside arguments."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeGuard, cast

from torch import Tensor

from .objects import copied_object, is_object

__all__ = [
    "aliased",
    "are_plain",
    "copied",
    "is_namedtuple",
    "map_leaves",
    "map_structure",
    "map_tensors",
    "tensors_in",
]


def is_namedtuple(value: object) -> bool:
    """Tell whether `value` is a tuple with named fields that its class takes one by one."""
    return isinstance(value, tuple) and hasattr(cast("object", value), "_fields")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return the tensors in `value`, in order."""
    found: list[Tensor] = []
    _collect(value, found)
    return iter(found)


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in cast("Sequence[Any]", value):
            _collect(item, found)
    elif isinstance(value, (dict, Mapping)):
        for item in cast("Mapping[Any, Any]", value).values():
            _collect(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), found)


def map_tensors(function: Callable[[Tensor], Any], value: Any, within: Callable[[Tensor], Any] | None = None) -> Any:
    """Return `value` rebuilt with `function` of each tensor in it, objects copied; what holds none is kept as it is.

    Args:
        function: of a tensor.
        value: what holds tensors, or is one.
        within: of a tensor that an object holds, where that is to be another function.
    """
    if type(value) is Tensor:  # as most values are
        return function(value)
    if type(value) is tuple:
        items = cast("tuple[Any, ...]", value)
        if are_plain(items):  # as most arguments are
            return tuple(map(function, items))

    def change(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        return copied_object(leaf, within or function) if is_object(leaf) else leaf

    if isinstance(value, (tuple, list, Mapping)) or dataclasses.is_dataclass(value):
        return map_leaves(change, value)
    return change(value)


def are_plain(values: Iterable[object]) -> TypeGuard[Iterable[Tensor]]:
    """Tell whether all values are tensors, and of no class of their own."""
    return set(map(type, values)) <= _PLAIN


_PLAIN = {Tensor}
_SEQUENCES: tuple[Any, ...] = (tuple, list)


def copied(value: Any) -> Any:
    """Return `value` with copies of its tensors, free of any autograd graph, and of the objects in it."""
    return map_tensors(_copy, value)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def aliased(value: Any) -> Any:
    """Return `value` with other tensors on the same memory: who gives one another shape leaves that in `value` alone.

    What `copied` alone can protect is copied: the objects in `value`, and tensors of other kinds.
    """
    return map_tensors(_alias, value, _copy)


def _alias(tensor: Tensor) -> Tensor:
    return _copy(tensor) if type(tensor) is not Tensor or tensor.is_inference() else tensor.detach()


def map_leaves(function: Callable[[Any], Any], value: Any, leaf: type | None = None) -> Any:
    """Return `value` rebuilt with `function` of everything in it that is no container, or that is a `leaf`."""
    kind = cast("Any", type(value))
    if leaf is not None and issubclass(kind, leaf):
        return function(value)
    if kind in _SEQUENCES:
        return kind(map_leaves(function, item, leaf) for item in value)
    if kind is dict:
        return {key: map_leaves(function, item, leaf) for key, item in value.items()}
    if isinstance(value, tuple):
        value = cast("tuple[Any, ...]", value)
        return _rebuild_tuple(value, [map_leaves(function, item, leaf) for item in value])
    if kind is slice:
        return slice(*(map_leaves(function, part, leaf) for part in (value.start, value.stop, value.step)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _rebuild_dataclass(
            value, {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, function, leaf
        )
    if isinstance(value, MutableMapping):
        return _rebuild_mapping(value, function, leaf)
    return function(value)


def _rebuild_tuple(value: tuple[Any, ...], items: list[Any]) -> Any:
    """Rebuild named tuples, which take fields, and `torch.Size` and torch's results, which take one sequence."""
    try:
        return type(value)(*items) if is_namedtuple(value) else type(value)(items)
    except TypeError:
        return tuple(items)


def _rebuild_dataclass(value: Any, fields: dict[str, Any], function: Callable[[Any], Any], leaf: type | None) -> Any:
    new: Any = copy.copy(value)
    for name, item in fields.items():
        mapped = map_leaves(function, item, leaf)
        if mapped is not item:
            object.__setattr__(new, name, mapped)
            if isinstance(value, dict) and name in value:
                dict.__setitem__(new, name, mapped)
    return new


def _rebuild_mapping(value: Any, function: Callable[[Any], Any], leaf: type | None) -> Any:
    new = copy.copy(value)
    for key in list(value):
        new[key] = map_leaves(function, value[key], leaf)
    return new


def map_structure(argument: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to the leaves of an fx argument: tuples, lists, dicts and slices are kept."""
    if type(argument) is tuple:
        return tuple([map_structure(item, function) for item in cast("tuple[Any, ...]", argument)])
    if not isinstance(argument, (tuple, list, dict, slice)):
        return function(argument)
    if isinstance(argument, tuple):
        items = [map_structure(item, function) for item in cast("tuple[Any, ...]", argument)]
        kind: Any = type(cast("object", argument))
        return kind(*items) if hasattr(kind, "_fields") else tuple(items)
    if isinstance(argument, list):
        return [map_structure(item, function) for item in cast("list[Any]", argument)]
    if isinstance(argument, dict):
        return {key: map_structure(item, function) for key, item in cast("dict[Any, Any]", argument).items()}
    parts = cast("slice[Any, Any, Any]", argument)
    return slice(*(map_structure(part, function) for part in (parts.start, parts.stop, parts.step)))

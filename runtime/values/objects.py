"""What values hold: containers, and objects that forwards are given and hand on (caches, graphs of nodes and edges)."""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from .dynamic import cached_by_class
from .plain_types import PLAIN_TYPES

__all__ = [
    "copied_object", "has_attributes", "is_namedtuple", "is_object", "is_whole", "makes_objects", "objects_in",
    "parts_of", "state_of", "tensors_in", "tensors_within",
]  # fmt: skip

_ATOMS = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, enum.Enum, nn.Module,
    torch.Generator, Mapping, tuple, list,
)  # fmt: skip
_WHOLE = (
    "transformers.cache_utils.Cache", "torch_geometric.data.data.BaseData",
    "torch_geometric.nn.pool.select.base.SelectOutput", "torch_geometric.nn.pool.connect.base.ConnectOutput",
)  # fmt: skip


def is_object(value: object) -> bool:
    """Tell whether a value is an object of a class written in Python: it may hold tensors, and change."""
    return makes_objects(type(value))


@cached_by_class
def makes_objects(cls: Any) -> bool:
    """Tell whether a class is one whose values `is_object` takes for objects."""
    package = cls.__module__.partition(".")[0]
    if package in ("builtins", "torch", "numpy") or issubclass(cls, (Tensor, *_ATOMS)):
        return False
    return hasattr(cls, "__dict__") and "__dict__" in dir(cls) and not dataclasses.is_dataclass(cls)


def is_whole(cls: type) -> bool:
    """Tell by a class's name whether objects of it are handed on as they are, and never looked into."""
    return any(f"{base.__module__}.{base.__qualname__}" in _WHOLE for base in cls.__mro__)


def is_namedtuple(value: object) -> bool:
    """Tell whether `value` is a tuple with named fields that its class takes one by one."""
    return isinstance(value, tuple) and hasattr(cast("object", value), "_fields")


def parts_of(value: object) -> list[tuple[Any, Any]]:
    """Return what a container, a dataclass or an object holds, each with its key, its place or its name."""
    if isinstance(value, Mapping):
        return list(cast("Mapping[Any, Any]", value).items())
    if isinstance(value, (tuple, list, set)):
        items: Any = cast("Any", value)
        return list(zip(items._fields if is_namedtuple(items) else range(len(items)), items, strict=True))
    if has_attributes(value):
        return list(vars(value).items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, in order; what objects hold is not looked into."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) not in _HOLDING_NOTHING and not is_object(value):
        for _, part in parts_of(value):
            yield from tensors_in(part)


def objects_in(value: Any) -> list[Any]:
    """Return the objects in `value`, in order; what they hold themselves is not looked into."""
    if type(value) in _HOLDING_NOTHING:  # as most arguments are
        return []
    return [value] if is_object(value) else [found for _, part in parts_of(value) for found in objects_in(part)]


_HOLDING_NOTHING = frozenset((Tensor, nn.Parameter, *PLAIN_TYPES))


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, those that objects hold included, each once."""
    yield from (item for item in _reachable(value, set()) if isinstance(item, Tensor))


def copied_object(
    value: Any, change: Callable[[Tensor], Any] = lambda tensor: tensor, done: dict[int, Any] | None = None
) -> Any:
    """Return a copy of an object with `change` of each tensor in it, itself if that cannot be; modules are shared."""
    pinned: dict[int, Any] = {} if done is None else done
    for item in _reachable(value, set()):
        if id(item) not in pinned:
            pinned[id(item)] = change(item) if isinstance(item, Tensor) else item
    try:
        return copy.deepcopy(value, pinned)
    except Exception:  # classes may refuse copies in any way; such an object is used as it is
        pinned[id(value)] = value
        return value


def _reachable(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the tensors and modules that can be reached from `value`, each once."""
    if isinstance(value, (Tensor, nn.Module)):
        if id(value) not in seen:
            seen.add(id(value))
            yield value
        return
    parts = parts_of(value)
    if parts and id(value) not in seen:
        seen.add(id(value))
        for _, part in parts:
            yield from _reachable(part, seen)


def has_attributes(value: object) -> bool:
    """Tell whether a value is an object, or a dataclass, that has its attributes in a dictionary."""
    kind = cast("Any", type(value))
    return makes_objects(kind) or (dataclasses.is_dataclass(kind) and "__dict__" in dir(kind))


def state_of(value: object, depth: int = 12) -> Any:
    """Return what can be compared to see whether an object, or a container, has changed; tensors count by identity.
    Below `depth` objects and containers count by their class only, and again by their identity.
    """
    return _state(value, depth, {})


def _state(value: Any, depth: int, described: dict[int, tuple[int, Any]]) -> Any:
    """Describe a value; `described` keeps what holds others, and the depth to which it was described before."""
    if isinstance(value, PLAIN_TYPES):
        return value
    if isinstance(value, (Tensor, nn.Module, fx.Proxy)) or not _holds_others(value):
        return id(value)
    if id(value) in described and described[id(value)][0] >= depth:
        return id(value)
    kind = cast("Any", type(value))
    if depth == 0:
        return kind
    described[id(value)] = depth, value
    parts = parts_of(value)
    return kind, [key for key, _ in parts], [_state(part, depth - 1, described) for _, part in parts]


def _holds_others(value: object) -> bool:
    return is_object(value) or isinstance(value, (tuple, list, set, Mapping))

"""Objects that forwards are given and hand on (caches, graphs of nodes and edges): copies of them, and their state."""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from .class_cache import cached_by_class
from .plain_types import PLAIN_TYPES

__all__ = [
    "copied_object",
    "has_attributes",
    "is_object",
    "is_whole",
    "makes_objects",
    "objects_in",
    "state_of",
    "tensors_within",
]

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
    """Tell whether objects that a forward makes of a class are handed on as they are, and never looked into.

    A class is known by its name, so that the libraries need not be there.
    """
    return any(f"{base.__module__}.{base.__qualname__}" in _WHOLE for base in cls.__mro__)


def objects_in(value: Any) -> list[Any]:
    """Return the objects in `value`, in order; what they hold themselves is not looked into."""
    found: list[Any] = []
    _collect_objects(value, found)
    return found


def _collect_objects(value: object, found: list[Any]) -> None:
    kind = type(value)
    if kind in _NO_OBJECTS:  # as most arguments are
        return
    if makes_objects(kind):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in cast("tuple[Any, ...]", value):
            _collect_objects(item, found)
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            _collect_objects(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect_objects(getattr(value, field.name, None), found)


_NO_OBJECTS = frozenset((Tensor, nn.Parameter, *PLAIN_TYPES))


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, those that objects hold included, each once."""
    yield from (item for item in _reachable(value, set()) if isinstance(item, Tensor))


def _shared(tensor: Tensor) -> Tensor:
    return tensor


def copied_object(value: Any, change: Callable[[Tensor], Any] = _shared) -> Any:
    """Return a copy of an object with `change` of each tensor in it, or the tensors themselves; modules are shared.

    One that cannot be copied is returned itself.
    """
    pinned: dict[int, Any] = {}
    for item in _reachable(value, set()):
        pinned[id(item)] = change(item) if isinstance(item, Tensor) else item
    try:
        return copy.deepcopy(value, pinned)
    except Exception:  # classes may refuse copies in any way; such an object is used as it is
        return value


def _reachable(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the tensors and modules that can be reached from `value`, each once."""
    if isinstance(value, (Tensor, nn.Module)):
        if id(value) not in seen:
            seen.add(id(value))
            yield value
        return
    parts = _parts(value)
    if parts and id(value) not in seen:
        seen.add(id(value))
        for part in parts:
            yield from _reachable(part, seen)


def _parts(value: object) -> list[Any]:
    """Return what a container or an object holds."""
    found: list[Any] = list(vars(value).values()) if has_attributes(value) else []
    if isinstance(value, (tuple, list, set)):
        found += cast("list[Any]", value)
    if isinstance(value, Mapping):
        found += cast("Mapping[Any, Any]", value).values()
    return found


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
    return kind, _keys(value), [_state(part, depth - 1, described) for part in _parts(value)]


def _holds_others(value: object) -> bool:
    return is_object(value) or isinstance(value, (tuple, list, set, Mapping))


def _keys(value: object) -> list[Any]:
    found: list[Any] = list(vars(value)) if is_object(value) else []
    return [*found, *cast("Mapping[Any, Any]", value)] if isinstance(value, Mapping) else found

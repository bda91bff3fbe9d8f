"""Find and replace the tensors inside nested arguments and results: containers, dataclasses, plain objects."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["Arguments", "TensorFunction", "flatten", "plain", "replaced_tensors", "structure"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call."""
TensorFunction = Callable[[Tensor], Tensor]

_ATOMS: tuple[type, ...] = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType, torch.dtype, torch.device, torch.layout, torch.Generator, nn.Module,
)  # fmt: skip


def replaced_tensors(value: Any, change: TensorFunction) -> Any:
    """Return `value` with every tensor in it replaced by `change(tensor)`; one tensor used twice stays one tensor.

    Containers and objects are rebuilt, never edited; what holds no tensors (modules, functions) is passed on.
    """
    return _map(value, change, {})


def _map(value: Any, change: TensorFunction, done: dict[int, Any]) -> Any:
    if isinstance(value, _ATOMS):
        return value
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, Tensor):
        return done.setdefault(id(value), change(value))
    if isinstance(value, tuple):
        return _map_tuple(cast("tuple[Any, ...]", value), change, done)
    return _map_object(value, change, done)


def _map_tuple(value: tuple[Any, ...], change: TensorFunction, done: dict[int, Any]) -> Any:
    items = [_map(item, change, done) for item in value]
    if type(value) is tuple:
        return tuple(items)
    rebuild = cast("Callable[..., Any]", type(value))
    return rebuild(*items) if hasattr(value, "_fields") else rebuild(items)


def _map_object(value: Any, change: TensorFunction, done: dict[int, Any]) -> Any:
    twin: Any = copy.copy(value)
    done[id(value)] = twin
    if isinstance(twin, list):
        twin[:] = [_map(item, change, done) for item in cast("list[Any]", value)]
    elif isinstance(twin, MutableMapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            twin[key] = _map(item, change, done)
    for name, item in _attributes(value).items():
        vars(twin)[name] = _map(item, change, done)
    return done[id(value)]


def _attributes(value: object) -> dict[str, Any]:
    return dict(vars(value)) if hasattr(value, "__dict__") else {}


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
    parts = _parts(value)
    yield path, value, parts is None
    for step, item in parts or ():
        yield from _walk(item, path + step)


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """Return the steps from `value` to what it is made of; None for a leaf."""
    if isinstance(value, (Tensor, *_ATOMS)):
        return None
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in cast("Mapping[Any, Any]", value).items()]
    if isinstance(value, (list, tuple)):
        items = cast("list[Any]", value)
        names = getattr(items, "_fields", None)
        steps = [f"[{index}]" for index in range(len(items))] if names is None else [f".{name}" for name in names]
        return list(zip(steps, items, strict=True))
    fields = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else None
    names = fields or list(_attributes(value))
    return [(f".{name}", getattr(value, name)) for name in names] or None

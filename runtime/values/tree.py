"""The leaves of nested arguments and results by their paths, and what is left without them."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from .objects import is_namedtuple, parts_of

__all__ = ["flatten", "plain", "structure"]

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

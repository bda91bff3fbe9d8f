"""Tell which modules would trace alike: then one is traced, and all share what came out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from ..compat import own_children
from .meta import Meta, TensorMeta, meta_of
from .record import Call

__all__ = ["fingerprint", "hashable", "outline"]

_REGISTRIES = {"_parameters", "_buffers", "_modules"}
_HANDLED = frozenset(name for name in nn.Module().__dict__ if "hook" in name or name in _REGISTRIES)
"""Hooks run around a forward, not in it."""
_MAX_CALLS = 4


class _Unlike(Exception):
    """Something cannot be compared, so that the module is like no other."""


def fingerprint(module: nn.Module, calls: Sequence[Call | None]) -> Hashable | None:
    """Return everything that the trace of a module may depend on, or None if that cannot be said.

    These are its class; the structure of the modules in it, their classes, flags and plain attributes (those that are
    no plain values by identity); names, shapes and types of its tensors; and for each call the arguments, and which
    children were called with what result, tensors again by shape and type.
    """
    if len(calls) > _MAX_CALLS or any(call is not None and call.attributes for call in calls):
        return None
    structure = _Structure()
    try:
        inside = tuple(structure.of(module, ""))
        return type(module), inside, tuple(None if call is None else _call(call, structure.paths) for call in calls)
    except _Unlike:
        return None


def outline(module: nn.Module, calls: Sequence[Call | None]) -> Hashable:
    """Return, cheaply, what is different for modules of different fingerprints in most cases; equal ones have one."""
    call = calls[0]
    if call is None:
        return type(module)
    try:
        return type(module), len(calls), _value(call.args), _value(call.output)
    except _Unlike:
        return type(module), len(calls)


class _Structure:
    """Describe a module and those in it; what occurs twice is described as the same thing."""

    def __init__(self) -> None:
        self.paths: dict[nn.Module, str] = {}
        self._tensors: dict[int, int] = {}

    def of(self, module: nn.Module, path: str) -> list[Hashable]:
        if module in self.paths:
            return [(path, self.paths[module])]
        self.paths[module] = path
        attributes = module.__dict__
        described: list[Hashable] = [path, type(module)]
        for name in ("_parameters", "_buffers"):
            described.extend((key, self._attribute(item)) for key, item in attributes[name].items())
        described.extend((n, self._attribute(v)) for n, v in attributes.items() if n not in _HANDLED)
        for name, child in own_children(module).items():
            if child is not None:
                described.extend(self.of(child, f"{path}.{name}" if path else name))
        return described

    def _attribute(self, value: Any) -> Hashable:
        if value is None or isinstance(value, (bool, int, float, str)):
            return type(value), value
        if isinstance(value, Tensor):
            return type(value), hashable(meta_of(value)), self._tensors.setdefault(id(value), len(self._tensors))
        return self._container(value)

    def _container(self, value: Any) -> Hashable:
        kind = cast("type[object]", type(value))
        if kind in (tuple, list):
            return kind, tuple(self._attribute(item) for item in value)
        if kind is set:
            return frozenset(self._attribute(item) for item in value)
        if kind is dict:
            return tuple((key, self._attribute(item)) for key, item in value.items())
        return id(value)


def _call(call: Call, paths: dict[nn.Module, str]) -> Hashable:
    args, kwargs = call.forward_arguments
    children = tuple((paths.get(child), _value(inner.output)) for child, inner in call.children)
    return _value(args), tuple((name, _value(value)) for name, value in kwargs.items()), children


def _value(value: Any) -> Hashable:
    kind = cast("type[object]", type(value))
    return kind, hashable(meta_of(value))


def hashable(meta: Meta) -> Hashable:
    """Return a description as something that can be a key.

    Raises:
        _Unlike: for an object that is described by its type only.
    """
    if isinstance(meta, TensorMeta) or meta is None:
        return meta
    if isinstance(meta, tuple):
        return tuple(hashable(item) for item in meta)
    if isinstance(meta, list):
        return ("list", *(hashable(item) for item in meta))
    if isinstance(meta, dict):
        return ("dict", *((key, hashable(item)) for key, item in meta.items()))
    if isinstance(meta, type):
        raise _Unlike
    return type(meta), meta

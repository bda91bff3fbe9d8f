"""Values while graphs are joined into one: nodes of the new graph, constants, containers of both, and model outputs."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from ..errors import ArchiveError
from ..tracing.meta import TensorMeta
from .targets import ATTRIBUTES

__all__ = [
    "Fields",
    "Unfolded",
    "call_on_structure",
    "example_of",
    "fields_of",
    "fold",
    "holds",
    "holds_nodes",
    "mapped",
    "plain",
]

_CONSTANT_FUNCTIONS: frozenset[Any] = frozenset(
    cast(
        "tuple[Any, ...]",
        (
        len, list, round, operator.abs, operator.add, operator.and_, operator.eq, operator.floordiv, operator.ge,
        operator.getitem, operator.gt, operator.invert, operator.is_, operator.is_not, operator.le, operator.lshift,
        operator.lt, operator.mod, operator.mul, operator.ne, operator.neg, operator.not_, operator.or_, operator.pos,
        operator.pow, torch.device, operator.rshift, operator.sub, operator.truediv, operator.xor, operator.contains,
        *(f for f in vars(math).values() if callable(f) and not isinstance(f, type)),
        ),
    )
)  # fmt: skip
"""Functions that give the same for the same numbers, whenever they are called."""

_COUNTING: tuple[Any, ...] = (len, list, tuple)

_MODEL_OUTPUTS = ("transformers.utils.generic.ModelOutput", "transformers.file_utils.ModelOutput")


class Unfolded(Exception):
    """A call is to stay in the graph."""


@dataclass(frozen=True, eq=False)
class Fields:
    """A dataclass that some module returns; a flat graph knows its fields and not its class.

    Attributes:
        kind: its class.
        values: field -> value, in order.
        is_mapping: it also is a mapping of the fields that are not None (a model output of transformers).
    """

    kind: type
    values: Mapping[str, Any]
    is_mapping: bool

    @property
    def present(self) -> dict[str, Any]:
        """Return what the dataclass has as a dictionary."""
        return {key: value for key, value in self.values.items() if value is not None or not self.is_mapping}

    def item(self, key: Any) -> Any:
        """Return what `fields[key]` gives."""
        if not self.is_mapping:
            raise ArchiveError(f"it indexes a {self.kind.__name__}")
        return self.present[key] if isinstance(key, str) else tuple(self.present.values())[key]


def fields_of(kind: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Fields:
    """Return what calling a dataclass gives.

    Raises:
        ArchiveError: if making one runs code of its own, or its fields are not all known.
    """
    is_mapping = any(f"{base.__module__}.{base.__qualname__}" in _MODEL_OUTPUTS for base in kind.__mro__)
    declared = dataclasses.fields(kind)
    given = dict(zip((field.name for field in declared), args, strict=False)) | dict(kwargs)
    if not is_mapping and hasattr(kind, "__post_init__"):
        raise ArchiveError(f"it builds a {kind.__name__}, which runs code when it is made")
    if is_mapping and len(given) == 1 and not isinstance(next(iter(given.values())), fx.Node):
        raise ArchiveError(f"it builds a {kind.__name__} from one field that is no tensor")
    for field in declared:
        if field.name not in given and field.default is dataclasses.MISSING:
            raise ArchiveError(f"it builds a {kind.__name__} without its field {field.name!r}")
        given.setdefault(field.name, field.default)
    return Fields(kind, {field.name: given[field.name] for field in declared}, is_mapping)


def mapped(function: Callable[[fx.Node], Any], value: Any) -> Any:
    """Return `value` with `function` of each node in it."""
    if isinstance(value, fx.Node):
        return function(value)
    if isinstance(value, Fields):
        return Fields(value.kind, {key: mapped(function, item) for key, item in value.values.items()}, value.is_mapping)
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, slice):
        return slice(*mapped(function, [value.start, value.stop, value.step]))
    if isinstance(value, (tuple, list)):
        items = [mapped(function, item) for item in cast("Sequence[Any]", value)]
        if isinstance(value, list):
            return items
        kind = type(cast("object", value))
        if hasattr(kind, "_fields"):
            return kind(*items)
        return torch.Size(items) if kind is torch.Size else tuple(items)
    return value


def plain(value: Any) -> Any:
    """Return `value` with dictionaries in place of dataclasses."""
    if isinstance(value, Fields):
        return {key: plain(item) for key, item in value.present.items()}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in cast("dict[Any, Any]", value).items()}
    if type(value) in (tuple, list):
        return type(value)(plain(item) for item in value)
    return value


def holds(kinds: type | tuple[type, ...], value: Any) -> bool:
    """Say whether `value` is, or holds, one of `kinds`."""
    if isinstance(value, kinds):
        return True
    if isinstance(value, Fields):
        return holds(kinds, dict(value.values))
    if isinstance(value, dict):
        return any(holds(kinds, item) for item in cast("dict[Any, Any]", value).values())
    if isinstance(value, slice):
        return holds(kinds, (value.start, value.stop, value.step))
    return isinstance(value, (tuple, list)) and any(holds(kinds, item) for item in cast("Sequence[Any]", value))


def holds_nodes(value: Any) -> bool:
    """Say whether `value` hangs on what a call gives the model."""
    return holds(fx.Node, value)


def fold(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a call gives, where that is known before the model runs.

    Raises:
        Unfolded: if it is not.
        ArchiveError: if it never can be.
    """
    if len(args) == 2 and not kwargs:
        return _fold_pair(function, args[0], args[1])
    if function in _COUNTING and len(args) == 1 and _is_one_of(args[0], tuple, list, dict, Fields):
        return function(args[0].present if isinstance(args[0], Fields) else args[0])
    return _fold_constants(function, args, kwargs)


def _fold_pair(function: Any, first: Any, second: Any) -> Any:
    if function is getattr:
        return _fold_attribute(first, second)
    if function is operator.getitem and isinstance(first, Fields):
        return first.item(second)
    if function is operator.getitem and _is_one_of(first, tuple, list, dict) and not holds_nodes(second):
        return first[second]
    if function is operator.contains and _is_one_of(first, dict, Fields):
        return second in (first.present if isinstance(first, Fields) else first)
    if function in (operator.is_, operator.is_not) and _never_the_same(first, second):
        return function is operator.is_not
    if function is operator.add and _is_one_of(first, tuple, list) and type(first) is type(second):
        return first + second
    return _fold_constants(function, (first, second), {})


def _is_one_of(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds)


def _fold_attribute(owner: Any, name: str) -> Any:
    if isinstance(owner, Fields):
        if name not in owner.values:
            raise ArchiveError(f"it reads {name!r} of a {owner.kind.__name__}, which is no field of it")
        return owner.values[name]
    if isinstance(owner, (torch.dtype, torch.device)) and name in ATTRIBUTES:
        return getattr(owner, name)
    raise Unfolded


def _never_the_same(first: Any, second: Any) -> bool:
    """Say whether `first is second` is False for sure: a node's value is never None, a type or missing."""
    node, other = (first, second) if isinstance(first, fx.Node) else (second, first)
    if not isinstance(node, fx.Node):
        return holds((fx.Node, Fields), first) or holds((fx.Node, Fields), second)
    return other is None or isinstance(other, type)


def _fold_constants(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    values = (*args, *kwargs.values())
    if function not in _CONSTANT_FUNCTIONS or holds((fx.Node, Fields, torch.Tensor), values):
        raise Unfolded
    return function(*args, **kwargs)


def call_on_structure(name: str, owner: Any, args: Sequence[Any]) -> Any:
    """Return what a method of a dictionary, tuple, list or dataclass gives.

    Raises:
        ArchiveError: if it is none that looks something up.
    """
    items = owner.present if isinstance(owner, Fields) else owner
    if name == "to_tuple" and isinstance(owner, Fields) and owner.is_mapping:
        return tuple(owner.present.values())
    if name == "get" and isinstance(items, dict) and 1 <= len(args) <= 2 and not holds_nodes(args[0]):
        return cast("dict[Any, Any]", items).get(*args)
    if name in ("keys", "values", "items") and isinstance(items, dict) and not args:
        return list(getattr(cast("dict[Any, Any]", items), name)())
    if name == "numel" and isinstance(owner, torch.Size):
        return owner.numel()
    kind = owner.kind if isinstance(owner, Fields) else type(owner)
    raise ArchiveError(f"it calls .{name} on a {kind.__name__}")


def example_of(value: Any) -> Any:
    """Return a value like those that `value` will have, for guards to be asked about."""
    return mapped(lambda node: _example(node.meta.get("val", object())), value)


def _example(meta: Any) -> Any:
    if isinstance(meta, TensorMeta):
        try:
            return torch.empty(meta.shape, dtype=meta.dtype, device=meta.device)
        except (RuntimeError, AssertionError):  # the device is not here, or has no room
            return torch.empty(meta.shape, dtype=meta.dtype, device="meta")
    if isinstance(meta, (tuple, list)):
        return type(cast("Any", meta))(_example(item) for item in cast("Sequence[Any]", meta))
    if isinstance(meta, dict):
        return {key: _example(item) for key, item in cast("dict[Any, Any]", meta).items()}
    return meta

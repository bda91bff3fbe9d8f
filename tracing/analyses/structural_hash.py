"""The structural hash: modules that are alike, so that what is found out about one of them holds for all."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...compat import REGIONS, children_of, modules_by_name, own_buffers, own_parameters
from ...operators import Cache
from ...runtime.graphs import FOUND, capture_of
from ...runtime.values import PLAIN_TYPES, Factors, is_leaf, qualified, user_class
from ..examples import Inputs

__all__ = ["Described", "HashLevel", "StructuralHash", "numbers_of"]

_PLAIN = frozenset((*PLAIN_TYPES, torch.Size))
_HOOKS = tuple(name for name in nn.Module().__dict__ if "_hooks" in name)
_SKIPPED = frozenset(("_parameters", "_buffers", "_modules", *_HOOKS))
_GRAPHS = frozenset(("_fxopt_capture", "_fxopt_fallback", FOUND))


class HashLevel(enum.Enum):
    """In what sense modules are alike, apart from the values of their tensors."""

    TRACED = "traced"
    """What a trace of one, or an analysis of its graphs, says holds for the other: both hold the very same objects."""
    NUMBERED = "numbered"
    """As `TRACED` if no trace reads a whole number in which the two differ, such as the number of a layer."""
    REWRITTEN = "rewritten"
    """A rewrite does the same to both: other graphs of equal code, and other dataclasses of equal fields, will do."""
    TIMED = "timed"
    """Both take as long: other code of one class, other objects of one type, and other settings of it will do."""


@dataclasses.dataclass(frozen=True)
class _Same:
    """Stand for one object, which is equal to itself only; holding it keeps its identity from being used again."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


_Parts = list[tuple[str | None, "Tensor | nn.Module"]]
"""The tensors and children that a module holds, with their names; None for a tensor that it does not register."""


@dataclasses.dataclass(frozen=True, eq=False)
class Described:
    """A module as it is now: its `key` is equal for alike modules, down to which of their tensors and modules are one.
    `paths` are the names of the modules in it, `tensors` those of its tensors by id; None if they are not registered.
    """

    key: Hashable
    paths: Mapping[nn.Module, str]
    tensors: Mapping[int, str | None]
    _held: Sequence[_Parts] = dataclasses.field(repr=False)


class StructuralHash:
    """Describe modules as they are now, each once. Alike are those of one class with the same settings, flags, forms of
    tensors and `requires_grad`, and children that are alike under the same names; one with hooks is like no other.
    `numbers` are shared where several objects are to be compared.
    """

    def __init__(self, alike: HashLevel = HashLevel.TRACED, numbers: dict[Hashable, int] | None = None) -> None:
        self._alike = alike
        self._numbers: dict[Hashable, int] = {} if numbers is None else numbers
        self._known: dict[nn.Module, tuple[int, _Parts]] = {}

    @classmethod
    def compute(cls, program: object) -> StructuralHash:
        """Describe the modules of a program, until it changes."""
        return cls()

    def of(self, module: nn.Module) -> int:
        """Return a number that modules have in common that are alike; which tensors are one does not count."""
        return self._looked_at(module)[0]

    def whole(self, module: nn.Module, calls: Iterable[Inputs] = ()) -> Described:
        """Describe a module, and calls of it, down to which of the tensors and modules in them are one."""
        paths = {inner: path for path, inner in modules_by_name(module).items()}
        held = [self._looked_at(inner)[1] for inner in paths]
        tensors = _named_tensors(zip(paths.values(), held, strict=True))
        arguments: _Parts = []
        called = tuple(self._value((call.args, call.kwargs), arguments) for call in calls)
        order: dict[int, int] = {}
        ties = tuple(order.setdefault(id(part), len(order)) for parts in (*held, arguments) for _, part in parts)
        return Described((self.of(module), called, ties), paths, tensors, (*held, arguments))

    def _looked_at(self, module: nn.Module) -> tuple[int, _Parts]:
        known = self._known.get(module)
        if known is None:
            parts: _Parts = []
            described = self._described(module, parts)
            known = self._known[module] = self._numbers.setdefault(described, len(self._numbers)), parts
        return known

    def _described(self, module: nn.Module, parts: _Parts) -> Hashable:
        attributes: dict[str, Any] = vars(module)
        parameters, buffers = (
            tuple((name, self._registered(name, tensor, parts)) for name, tensor in registry.items())
            for registry in (own_parameters(module), own_buffers(module))
        )
        children = tuple((name, self._child(name, child, parts)) for name, child in children_of(module).items())
        if any(attributes.get(name) for name in _HOOKS):
            return _Same(module)
        skipped = self._skipped(module).union(attributes.get(REGIONS, ()))
        own = tuple((name, self._value(value, parts)) for name, value in attributes.items() if name not in skipped)
        kind = user_class(type(module)) if self._alike is HashLevel.TIMED else type(module)
        return kind, parameters, buffers, children, own

    def _skipped(self, module: nn.Module) -> frozenset[str]:
        """Return the attributes that do not count, such as the number of a layer that no graph reads."""
        if self._alike is HashLevel.TRACED:
            return _SKIPPED
        if self._alike is HashLevel.NUMBERED:
            return _SKIPPED if is_leaf(module) else _SKIPPED | numbers_of(module).keys()
        capture = capture_of(module)
        if capture is None:
            return _SKIPPED | _GRAPHS
        plain = {name for name, value in vars(module).items() if type(value) in _PLAIN}
        read = frozenset[str]() if self._alike is HashLevel.TIMED else capture.reads
        return _SKIPPED | _GRAPHS | (plain - read - {"training"})

    def _registered(self, name: str, tensor: Tensor | None, parts: _Parts) -> Hashable:
        if tensor is None:
            return None
        parts.append((name, tensor))
        return _form(tensor)

    def _child(self, name: str, child: nn.Module | None, parts: _Parts) -> int | None:
        if child is None:
            return None
        parts.append((name, child))
        return self.of(child)

    def _value(self, value: Any, parts: _Parts) -> Hashable:
        kind = cast("type[Any]", type(value))
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, Tensor):
            parts.append((None, value))
            return _form(value)
        if self._holds_nothing_that_counts(kind):
            return kind
        if _holds_more(value):
            return kind if self._alike is HashLevel.TIMED else _Same(value)
        if isinstance(value, (tuple, list)):
            return kind, tuple(self._value(item, parts) for item in cast("Sequence[Any]", value))
        if kind in (set, frozenset):
            return kind, frozenset(self._value(item, parts) for item in value)
        if isinstance(value, Mapping):
            default, items = getattr(cast("Any", value), "default_factory", None), cast("dict[Any, Any]", value).items()
            described = tuple((self._value(key, parts), self._value(item, parts)) for key, item in items)
            return kind, self._value(default, parts), described
        return self._object(value, parts)

    def _holds_nothing_that_counts(self, kind: type[Any]) -> bool:
        if self._alike is HashLevel.TIMED:
            return issubclass(kind, (Cache, Factors))
        return self._alike is HashLevel.REWRITTEN and issubclass(kind, Cache)

    def _object(self, value: Any, parts: _Parts) -> Hashable:
        if (
            self._alike in (HashLevel.TRACED, HashLevel.NUMBERED)
            or not dataclasses.is_dataclass(value)
            or isinstance(value, type)
        ):
            return cast("type[Any]", type(value)) if self._alike is HashLevel.TIMED else _Same(value)
        names = (field.name for field in dataclasses.fields(value))
        return type(value), tuple(self._value(getattr(value, name), parts) for name in names)


def numbers_of(module: nn.Module) -> dict[str, int]:
    """Return the attributes of a module that are whole numbers."""
    return {name: value for name, value in vars(module).items() if type(value) is int}


def _named_tensors(held: Iterable[tuple[str, _Parts]]) -> dict[int, str | None]:
    tensors: dict[int, str | None] = {}
    for path, parts in held:
        for name, part in parts:
            if isinstance(part, Tensor):
                tensors.setdefault(id(part), name and qualified(path, name))
    return tensors


def _holds_more(value: Any) -> bool:
    """Say whether an object holds more than its items or the fields of a dataclass, which are all that is compared."""
    attributes = getattr(value, "__dict__", None)
    fields = dataclasses.fields(value) if attributes and dataclasses.is_dataclass(value) else ()
    return bool(attributes) and not {field.name for field in fields}.issuperset(attributes)


def _form(tensor: Tensor) -> Hashable:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    form = type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.layout, strides
    return (*form, tensor.requires_grad, tensor.is_conj(), tensor.is_neg())

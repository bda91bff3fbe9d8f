"""From the arguments of one call to placeholders, and to guards on everything that is no tensor."""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...runtime.guards import (
    Applied,
    Argument,
    Attribute,
    Guard,
    Has,
    Is,
    IsNot,
    Known,
    Source,
    equal,
    exactly,
    item_of,
    key_of,
    length_of,
    of_class,
    same_type,
    type_of,
)
from ...runtime.values import Absent, Signature, is_namedtuple
from ..examples import Untraceable
from ..recording import Computed

__all__ = ["VARYING", "Arguments"]

VARYING = "num_items_in_batch"
"""What transformers' `Trainer` gives to every model that takes `**kwargs`: a number, another one at each step."""
_TAKEN = frozenset(("self", "getattr"))
"""Names that generated code needs."""
_LITERALS = (bool, int, float, str, bytes)
_CONTAINERS: tuple[Any, ...] = (tuple, list, dict, torch.Size)
_CODE = (type, nn.Module, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_BOUND = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def _is_key(key: object) -> bool:
    """Tell whether a key has a spelling: a text, a number, or a tuple of such (a type of edges of a graph, say)."""
    if type(key) is tuple:
        return all(map(_is_key, cast("tuple[object, ...]", key)))
    return isinstance(key, (str, int))


class Arguments:
    """Walk the arguments of a call: each tensor, object (a cache, say) and size that the caller computed becomes a
    placeholder; the rest is bound and guarded. `places` is filled in: where their values are in the arguments.
    """

    def __init__(self, signature: Signature, placeholder: Callable[[str, Any], Any], places: dict[str, Source]) -> None:
        self.guards: list[Guard] = []
        self._places = places
        self._signature = signature
        self._placeholder = placeholder
        hidden = {p.name for p in signature.parameters} & _TAKEN
        if hidden:
            raise Untraceable(f"its forward has an argument named {hidden.pop()!r}")

    def of_call(self, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments to trace with, given parameter name -> example value."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in self._signature.parameters:
            value = values[parameter.name]
            if value is Absent:
                self._guard_absent(parameter.name)
                continue
            traced = self._walk(Argument(parameter.name), parameter.name, value)
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                args.extend(traced)
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
                kwargs.update(traced)
            elif parameter.kind is inspect.Parameter.KEYWORD_ONLY or self._signature.decorated:
                kwargs[parameter.name] = traced
            else:
                args.append(traced)
        return args, kwargs

    def without_values(self) -> tuple[list[Any], dict[str, Any]]:
        """Return arguments to trace with where no example is known: tensors, unless there is a default."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in self._signature.parameters:
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                self._guard_empty(parameter.name, "*")
                continue
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                self._guard_empty(parameter.name, "**")
                continue
            name = parameter.name
            required = parameter.default is inspect.Parameter.empty
            if not required and self._signature.decorated:
                self._guard_absent(name)
                continue
            source = Argument(name)
            value = self._traced(source, name, None) if required else self._walk(source, name, parameter.default)
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY or self._signature.decorated:
                kwargs[name] = value
            else:
                args.append(value)
        return args, kwargs

    def _walk(self, source: Source, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._traced(source, name, value)
        if isinstance(value, Computed):
            return self._traced(source, name, value.value)
        if isinstance(value, (tuple, list, dict)):
            return self._container(source, name, value)
        if self._constant(source, value):
            return value
        return self._object(source, name, value)

    def _traced(self, source: Source, name: str, value: Any) -> Any:
        self._guard(Guard(source, IsNot(key_of(None)), f"{source} is given"))
        if self._signature.decorated and isinstance(source, Argument):
            self._guard(Guard(source, IsNot(Known(Absent)), f"{source} is given"))
        return self._placed(source, name, value)

    def _placed(self, source: Source, name: str, value: Any) -> Any:
        proxy = self._placeholder(name, value)
        self._places[proxy.node.name] = source
        return proxy

    def _container(self, source: Source, name: str, value: Any) -> Any:
        kind = cast("Any", type(value))
        if kind not in _CONTAINERS and not is_namedtuple(value):
            return self._object(source, name, value)
        reason = f"{source} is a {kind.__name__} of {len(value)}"
        if kind in _CONTAINERS[:3]:
            self._guard(same_type(source, value, reason))
        else:
            self._guard(equal(Attribute(type_of(source), "__name__"), kind.__name__, reason))
        self._guard(equal(length_of(source), len(value), reason))
        if isinstance(value, dict):
            return self._mapping(source, name, cast("dict[Any, Any]", value))
        items = [self._item(source, name, index, item) for index, item in enumerate(value)]
        return kind(*items) if is_namedtuple(value) else kind(items)

    def _mapping(self, source: Source, name: str, value: dict[Any, Any]) -> dict[Any, Any]:
        items = {key: self._item(source, name, key, item, named=True) for key, item in value.items()}
        if len(items) > 1:
            # A forward that loops over the items sees their order.
            keys = tuple(items)
            self._guard(equal(Applied(tuple, (source,)), keys, f"{source} has its keys in the order {keys}"))
        return items

    def _item(self, source: Source, name: str, key: Any, item: Any, *, named: bool = False) -> Any:
        if not _is_key(key):
            raise Untraceable(f"its argument {source} has a key of type {type(key).__name__}")
        if named:
            self._guard(Guard(source, Has(key_of(key)), f"{source} has the key {key!r}"))
        if key == VARYING and type(item) in (int, float):
            item = Computed(item)
        told = "_".join(map(str, cast("tuple[Any, ...]", key))) if isinstance(key, tuple) else key
        return self._walk(item_of(source, key), f"{name}_{told}", item)

    def _object(self, source: Source, name: str, value: Any) -> Any:
        """Let an object in whole: the graph reads what it needs of it and calls its methods."""
        kind = cast("Any", type(value))
        if isinstance(value, _CODE):
            raise Untraceable(f"its argument {source} is a {kind.__name__}")
        self._guard(of_class(source, kind, f"{source} is a {kind.__name__}"))
        return self._placed(source, name, value)

    def _constant(self, source: Source, value: Any) -> bool:
        """Bind a plain value, and say whether it is one."""
        reason = f"{source} is {value!r}"
        if isinstance(value, enum.Enum):
            self._guard(of_class(source, type(value), reason))
            self._guard(equal(Attribute(source, "name"), value.name, reason))
            return True
        if value is not None and type(value) not in _LITERALS and not isinstance(value, _BOUND):
            return False
        guards = exactly(source, value, reason)
        if type(value) in (str, bytes):
            self._guard(same_type(source, value, reason))
        self.guards.extend(guards)
        return bool(guards)

    def _guard_absent(self, name: str) -> None:
        self._guard(Guard(Argument(name), Is(Known(Absent)), f"{name} is not given"))

    def _guard_empty(self, name: str, stars: str) -> None:
        self._guard(equal(length_of(Argument(name)), 0, f"{stars}{name} is empty"))

    def _guard(self, guard: Guard | None) -> None:
        if guard is not None:
            self.guards.append(guard)

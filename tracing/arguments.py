"""From the arguments of one call to placeholders, and to guards on everything that is no tensor."""

from __future__ import annotations

import enum
import functools
import inspect
import math
import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from .guards import GUARD_NAMES, Guard
from .record import Computed
from .signature import Absent, Signature
from .structure import is_namedtuple
from .untraceable import Untraceable

__all__ = ["Arguments"]

_LITERALS = (int, float, str, bytes)
_CONTAINERS: tuple[Any, ...] = (tuple, list, dict, torch.Size)
_CODE = (type, nn.Module, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_BOUND = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class Arguments:
    """Walk the arguments of a call: each tensor, and each size that the caller computed, becomes a placeholder.

    Objects (caches, say) are placeholders, too, whose class is guarded. The rest is bound and guarded.

    Args:
        signature: of the forward.
        placeholder: makes the placeholder for a tensor, from its name and example value (None if there is none).
        expressions: filled in: name of a placeholder -> Python for it over the forward's arguments.

    Attributes:
        guards: conditions under which another call has the same structure and the same bound values.
    """

    def __init__(
        self, signature: Signature, placeholder: Callable[[str, Any], Any], expressions: dict[str, str]
    ) -> None:
        self.guards: list[Guard] = []
        self._expressions = expressions
        self._signature = signature
        self._placeholder = placeholder
        hidden = {p.name for p in signature.parameters} & (set(GUARD_NAMES) | {"self"})
        if hidden:
            raise Untraceable(f"its forward has an argument named {hidden.pop()!r}")

    def of_call(self, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments to trace with, given parameter name -> example value."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in self._signature.parameters:
            value = values[parameter.name]
            if value is Absent:
                self._guard(f"{parameter.name} is Absent", f"{parameter.name} is not given")
                continue
            traced = self._walk(parameter.name, parameter.name, value)
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
                self._guard(f"len({parameter.name}) == 0", f"*{parameter.name} is empty")
                continue
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                self._guard(f"len({parameter.name}) == 0", f"**{parameter.name} is empty")
                continue
            name = parameter.name
            required = parameter.default is inspect.Parameter.empty
            if not required and self._signature.decorated:
                self._guard(f"{name} is Absent", f"{name} is not given")
                continue
            value = self._traced(name, name, None) if required else self._walk(name, name, parameter.default)
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY or self._signature.decorated:
                kwargs[name] = value
            else:
                args.append(value)
        return args, kwargs

    def _walk(self, expression: str, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._traced(expression, name, value)
        if isinstance(value, Computed):
            return self._traced(expression, name, value.value)
        if isinstance(value, (tuple, list, dict)):
            return self._container(expression, name, value)
        if self._constant(expression, value):
            return value
        return self._object(expression, name, value)

    def _traced(self, expression: str, name: str, value: Any) -> Any:
        self._guard(f"{expression} is not None", f"{expression} is given")
        if self._signature.decorated and expression.isidentifier():
            self._guard(f"{expression} is not Absent", f"{expression} is given")
        proxy = self._placeholder(name, value)
        self._expressions[proxy.node.name] = expression
        return proxy

    def _container(self, expression: str, name: str, value: Any) -> Any:
        kind = cast("Any", type(value))
        if kind not in _CONTAINERS and not is_namedtuple(value):
            return self._object(expression, name, value)
        named = f"type({expression}) is {kind.__name__}"
        if kind not in _CONTAINERS[:3]:
            named = f"type({expression}).__name__ == {kind.__name__!r}"
        self._guard(
            f"({named} and len({expression}) == {len(value)})", f"{expression} is a {kind.__name__} of {len(value)}"
        )
        if isinstance(value, dict):
            return self._mapping(expression, name, cast("dict[Any, Any]", value))
        items = [self._item(expression, name, index, item) for index, item in enumerate(value)]
        return kind(*items) if is_namedtuple(value) else kind(items)

    def _mapping(self, expression: str, name: str, value: dict[Any, Any]) -> dict[Any, Any]:
        items = {key: self._item(expression, name, key, item, named=True) for key, item in value.items()}
        if len(items) > 1:
            # A forward that loops over the items sees their order.
            keys = tuple(items)
            self._guard(f"tuple({expression}) == {keys!r}", f"{expression} has its keys in the order {keys}")
        return items

    def _item(self, expression: str, name: str, key: Any, value: Any, *, named: bool = False) -> Any:
        if not isinstance(key, (str, int)):
            raise Untraceable(f"its argument {expression} has a key of type {type(key).__name__}")
        if named:
            self._guard(f"{key!r} in {expression}", f"{expression} has the key {key!r}")
        return self._walk(f"{expression}[{key!r}]", f"{name}_{key}", value)

    def _object(self, expression: str, name: str, value: Any) -> Any:
        """Let an object in whole: the graph reads what it needs of it and calls its methods."""
        kind = cast("Any", type(value))
        if isinstance(value, _CODE):
            raise Untraceable(f"its argument {expression} is a {kind.__name__}")
        self._guard(f"type({expression}).__qualname__ == {kind.__qualname__!r}", f"{expression} is a {kind.__name__}")
        proxy = self._placeholder(name, value)
        self._expressions[proxy.node.name] = expression
        return proxy

    def _constant(self, expression: str, value: Any) -> bool:
        """Bind a plain value, and say whether it is one."""
        reason = f"{expression} is {value!r}"
        if value is None or isinstance(value, bool):
            self._guard(f"{expression} is {value!r}", reason)
        elif type(value) in _LITERALS and value == value:
            text = repr(value) if value not in (math.inf, -math.inf) else f"float('{value}')"
            self._guard(f"({expression} == {text} and type({expression}) is {type(value).__name__})", reason)
        elif isinstance(value, _BOUND):
            text = f"torch.{value!r}" if isinstance(value, torch.device) else repr(value)
            self._guard(f"{expression} == {text}", reason)
        elif isinstance(value, enum.Enum):
            kind, name = type(value).__qualname__, value.name
            self._guard(f"(type({expression}).__qualname__ == {kind!r} and {expression}.name == {name!r})", reason)
        else:
            return False
        return True

    def _guard(self, expression: str, reason: str) -> None:
        self.guards.append(Guard(expression, reason))

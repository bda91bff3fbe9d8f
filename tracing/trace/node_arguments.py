"""Turn the values that traced code passes around into the arguments of graph nodes."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, cast

from torch import Tensor

from ...runtime.values import is_namedtuple
from ..proxies import PLAIN, ValueProxy
from .attributes import Attributes
from .protocol import Tracer

__all__ = ["NodeArguments"]

_CONSTANTS = (enum.Enum, range)


class NodeArguments:
    """Replace proxies by their nodes and tensors by get_attr nodes, containers included."""

    def __init__(self, tracer: Tracer, attributes: Attributes) -> None:
        self._tracer = tracer
        self._attributes = attributes

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for a node."""
        return tuple(self.value(item) for item in args), {key: self.value(item) for key, item in kwargs.items()}

    def value(self, value: Any) -> Any:
        """Return one argument for a node; give up if it is, or holds, something that a graph cannot."""
        kind = cast("type[object]", type(value))
        if issubclass(kind, ValueProxy):
            return self._node(value)
        if isinstance(value, float):  # numpy's, too
            return float(value)
        if kind in PLAIN or isinstance(value, _CONSTANTS):
            return value
        if kind is slice:
            return slice(self.value(value.start), self.value(value.stop), self.value(value.step))
        if isinstance(value, Tensor):
            return self._attributes.of_tensor(value).node
        if issubclass(kind, (tuple, list, dict)) and not dataclasses.is_dataclass(value):
            return self._container(value)
        return self._object(value)

    def _node(self, proxy: ValueProxy) -> Any:
        if proxy.tracer is not self._tracer:
            self._tracer.fail("it uses a value that another forward computed")
        return proxy.node

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            pairs = cast("dict[Any, Any]", value)
            if type(pairs) is not dict:
                return self._tracer.fail(f"it passes on a {type(pairs).__name__}")
            return {key: self.value(item) for key, item in pairs.items()}
        items = [self.value(item) for item in value]
        if is_namedtuple(value):
            return type(value)(*items)
        return items if isinstance(value, list) else tuple(items)

    def _object(self, value: Any) -> Any:
        held = self._attributes.of_object(value)
        if held is not None:
            return held.node
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value)
        return self._tracer.fail(f"it passes on a {type(value).__name__}")

    def _dataclass(self, value: Any) -> Any:
        """Rebuild a dataclass (a model output, say) in the graph, from its fields."""
        fields = dataclasses.fields(value)
        if not all(field.init for field in fields):
            self._tracer.fail(f"it builds a {type(value).__name__}, and not all of its fields can be set")
        kwargs = {field.name: self.value(getattr(value, field.name)) for field in fields}
        present = {name: item for name, item in kwargs.items() if item is not None}
        return self._tracer.graph.call_function(cast("type[Any]", type(value)), (), present)

"""Proxies for the values of a forward while it is traced: they record what is done to them, and know an example."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, cast

from torch import Tensor, fx

from ...runtime.values import PLAIN_TYPES, map_leaves
from .protocol import Tracer

__all__ = [
    "PLAIN", "UNKNOWN", "MethodProxy", "ValueProxy", "class_proxy", "examples_of", "is_tensor_method", "proxies_in",
]  # fmt: skip


class _Unknown:
    """The example value of a proxy traced without example inputs."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()


class ValueProxy(fx.Proxy):
    """Record operations as nodes, and answer questions from an example value. Where the answer steers Python (`if`,
    `range`, `len`), the tracer makes a guard of it, or gives up if data decide.
    """

    node: fx.Node
    tracer: Tracer
    fxopt_value: Any

    def __init__(self, node: fx.Node, tracer: Tracer, value: Any) -> None:
        attributes = self.__dict__
        attributes["node"], attributes["tracer"], attributes["fxopt_value"] = node, tracer, value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.tracer.attribute_of(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.tracer.set_attribute(self, name, value)

    def __repr__(self) -> str:
        return f"ValueProxy({self.node.name})"

    def __str__(self) -> str:
        return str(self.tracer.decisions.plain(self))

    def __format__(self, spec: str) -> str:
        return self.tracer.decisions.text(self, spec)

    # Decisions

    def __bool__(self) -> bool:
        return self.tracer.decisions.truth(self)

    def __int__(self) -> int:
        return int(self.tracer.decisions.plain(self))

    def __float__(self) -> float:
        return float(self.tracer.decisions.plain(self))

    def __complex__(self) -> complex:
        return complex(self.tracer.decisions.plain(self))

    def __index__(self) -> int:
        return self.tracer.decisions.index(self, _caller())

    def __len__(self) -> int:
        return self.tracer.decisions.length(self)

    def __hash__(self) -> int:
        return self.tracer.hash_of(self, _caller())

    def __contains__(self, item: Any) -> bool:
        return self.tracer.decisions.contains(self, item)

    def __iter__(self) -> Iterator[Any]:
        return self.tracer.decisions.iterate(self, _caller())

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.fail("it turns a value into a numpy array")

    def __array_ufunc__(self, function: Callable[..., Any], method: str, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.fail("it gives a value to numpy")

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        return self.tracer.fail("it gives a value to numpy")

    @property
    def keys(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  it may be a field, too
        return self.tracer.attribute_of(self, "keys")

    def __round__(self, digits: int | None = None) -> Any:
        args = (self,) if digits is None else (self, digits)
        return self.tracer.create_proxy("call_function", round, args, {})

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def fxopt_item(self, key: Any) -> Any:
        """Return the item at `key`."""
        return self.tracer.create_proxy("call_function", operator.getitem, (self, key), {})

    # Changes

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __enter__(self) -> Any:
        return self.tracer.fail("enters a device, or another value, as a context")

    def __exit__(self, *error: object) -> None:
        """Do nothing: it was not entered."""

    def __delitem__(self, key: Any) -> None:
        self.tracer.fail("deletes items of a value")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", "__call__", (self, *args), kwargs)

    @classmethod
    def __torch_function__(
        cls, orig_method: Callable[..., Any], types: Any, args: Any = None, kwargs: Any = None
    ) -> Any:
        """Record a function that got past the tracer's own mode."""
        proxy = next(value for value in proxies_in((args, kwargs)))
        return proxy.tracer.torch_function(orig_method, args or (), kwargs or {})


def _caller() -> FrameType:
    """Return the frame that asked: the one outside this class."""
    return sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  inspect is slower


def proxies_in(value: Any) -> Iterator[ValueProxy]:
    """Yield the proxies in an argument, in order."""
    if issubclass(type(value), ValueProxy):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in cast("Iterable[Any]", value):
            yield from proxies_in(item)
    elif isinstance(value, dict):
        for item in cast("dict[Any, Any]", value).values():
            yield from proxies_in(item)
    elif isinstance(value, slice):
        yield from proxies_in((value.start, value.stop, value.step))


def _in_place(name: str) -> Callable[[ValueProxy, Any], Any]:
    changing, pure = getattr(operator, f"i{name}"), getattr(operator, {"and": "and_", "or": "or_"}.get(name, name))

    def apply(self: ValueProxy, other: Any) -> Any:
        """Change a tensor in place; anything else becomes a new value, as in Python."""
        function = changing if isinstance(self.fxopt_value, Tensor) or self.fxopt_value is UNKNOWN else pure
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return apply


for _name in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split():
    setattr(ValueProxy, f"__i{_name}__", _in_place(_name))


class MethodProxy:
    """A method of a proxied value; calling it records a call_method node."""

    __slots__ = ("__name__", "_owner")

    def __init__(self, owner: ValueProxy, name: str) -> None:
        self._owner = owner
        self.__name__ = name

    @property
    def __self__(self) -> ValueProxy:
        return self._owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner.tracer.create_proxy("call_method", self.__name__, (self._owner, *args), kwargs)


PLAIN = frozenset((*PLAIN_TYPES, type(...)))
"""Types of values that stand in graphs as they are."""


def is_tensor_method(function: Callable[..., Any], name: str) -> bool:
    """Answer as `torch.overrides.is_tensor_method_or_property`, which first lists all of torch: 40 ms."""
    return getattr(Tensor, name, None) is function or getattr(function, "__qualname__", "").startswith("TensorBase.")


class _NoExampleError(Exception):
    """A value is known to no example."""


def examples_of(arguments: Any) -> Any:
    """Return arguments with example values in place of proxies, or UNKNOWN where one has none."""
    try:
        return _example_of(arguments)
    except _NoExampleError:
        return UNKNOWN


def _example_of(value: Any) -> Any:
    kind = cast("type[object]", type(value))
    if kind is ValueProxy:
        if value.fxopt_value is UNKNOWN:
            raise _NoExampleError
        return value.fxopt_value
    if kind in PLAIN:
        return value
    if kind is tuple:
        return tuple([_example_of(item) for item in value])
    if kind is list:
        return [_example_of(item) for item in value]
    if kind is dict:
        return {key: _example_of(item) for key, item in value.items()}
    if any(proxy.fxopt_value is UNKNOWN for proxy in proxies_in(value)):
        raise _NoExampleError
    return map_leaves(_value, value, ValueProxy)


def _value(leaf: Any) -> Any:
    return leaf.fxopt_value if issubclass(type(leaf), ValueProxy) else leaf


_Make = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class _Standing(type):
    """The class of class proxies."""

    fxopt_class: Any
    fxopt_make: _Make

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.fxopt_make(cls.fxopt_class, args, kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.fxopt_class)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.fxopt_class)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.fxopt_class, name)


def class_proxy(cls: type, make: _Make) -> type:
    """Return a class whose calls are `make(cls, args, kwargs)`, and that answers like `cls` otherwise."""
    return _Standing(cls.__name__, (), {"fxopt_class": cls, "fxopt_make": staticmethod(make), "__slots__": ()})

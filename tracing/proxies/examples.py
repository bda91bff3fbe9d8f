"""What the proxies in an argument stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from ...runtime.values import PLAIN_TYPES, map_leaves
from .proxy import UNKNOWN, ValueProxy, proxies_in

__all__ = ["PLAIN", "examples_of", "is_tensor_method"]

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

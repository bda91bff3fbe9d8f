"""The class of a module that runs from graphs: its forward is the text that was printed from them."""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ..values import Signature, subclass
from .source import Code

__all__ = ["dynamic_class"]

_serial = itertools.count(1)


def dynamic_class(
    base: type[nn.Module],
    mixin: type,
    source: Code | None,
    signature: Signature | None,
    attributes: Callable[[], dict[str, Any]],
) -> type[nn.Module]:
    """Return the one subclass of `mixin` and `base` whose forward is `source`, named like `base`; `attributes` are
    asked for where it is not there yet.
    """
    names = () if source is None else tuple(sorted((name, id(value)) for name, value in source.names.items()))
    key = ("" if source is None else source.text, names)
    return subclass(base, (mixin,), lambda: _captured_body(base, mixin, source, signature, attributes), key=key)


def _captured_body(
    base: type[nn.Module],
    mixin: type,
    source: Code | None,
    signature: Signature | None,
    attributes: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    body: dict[str, Any] = {"__init__": _like(mixin.__init__, base.__init__), **attributes()}
    if source is not None and signature is not None:
        body["forward"] = _function(base, source, signature)
    return body


def _like(function: Any, model: Any) -> Any:
    """Return a copy of `function` that presents itself as `model`."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    return functools.wraps(model)(copy)


def _function(base: type[nn.Module], source: Code, signature: Signature) -> Any:
    filename = f"<fxopt {base.__qualname__}.forward {next(_serial)}>"
    names = dict(source.names)
    # The text was generated from a graph by source.py; every foreign object is a name, not text.
    exec(compile(source.text, filename, "exec"), names)  # noqa: S102
    function = names["forward"]
    function.__defaults__ = signature.defaults or None
    function.__kwdefaults__ = signature.keyword_defaults or None
    function.__module__ = base.__module__
    function.__qualname__ = f"{base.__qualname__}.forward"
    function.__doc__ = base.forward.__doc__
    function.__annotations__ = dict(getattr(base.forward, "__annotations__", {}))
    if inspect.unwrap(base.forward) is not base.forward:
        function.__signature__ = inspect.signature(base.forward)
    linecache.cache[filename] = (len(source.text), None, source.text.splitlines(keepends=True), filename)
    weakref.finalize(function, linecache.cache.pop, filename, None)
    return function

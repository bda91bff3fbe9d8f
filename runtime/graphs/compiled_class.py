"""The class of a module that runs from graphs: its forward is the text that was printed from them."""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

from torch import nn

from ..values import ContextFlag, Signature, subclass
from .source import Code

__all__ = ["compile_postponed", "dynamic_class", "postponing"]

_serial = itertools.count(1)

postponing = ContextFlag("postponing")
"""A forward is compiled where it is first asked for: most of those that a run writes are never called."""


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
    cls = subclass(base, (mixin,), lambda: _captured_body(base, mixin, source, signature, attributes), key=key)
    if not postponing:
        _compile(cls)  # a run in another thread may have made it
    return cls


def _captured_body(
    base: type[nn.Module],
    mixin: type,
    source: Code | None,
    signature: Signature | None,
    attributes: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    body: dict[str, Any] = {"__init__": _like(mixin.__init__, base.__init__), **attributes()}
    if source is not None and signature is not None:
        make = functools.partial(_function, base, source, signature)
        body["forward"] = _Postponed(make) if postponing else make()
    return body


class _Postponed:
    """Stand for the forward of a class until it is asked for, and have the function there from then on."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = weakref.ref(owner)

    def __get__(self, module: nn.Module | None, cls: type) -> Any:
        owner = cast("type[Any]", self._owner())
        found = vars(owner)["forward"]
        if found is self:  # else another thread was here
            found = owner.forward = self._make()
        return found.__get__(module, cls)


def compile_postponed(modules: Iterable[nn.Module]) -> None:
    """Compile the forwards of modules: compilers look for functions in classes, and take nothing else."""
    for module in modules:
        _compile(type(module))


def _compile(cls: type[nn.Module]) -> None:
    """Compile the forward of a class; that of TorchScript's classes is not to be had without a module."""
    found = next((vars(each)["forward"] for each in cls.__mro__ if "forward" in vars(each)), None)
    if isinstance(found, _Postponed):
        found.__get__(None, cls)


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

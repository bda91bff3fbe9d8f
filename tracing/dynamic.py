"""Classes made on the fly, that pass for the class they derive from.

A dynamic class carries `_fxopt_base`, the user's class. One that is not made here (`layers/members.py` has its own)
carries `_fxopt_recipe` too: a function and its arguments, both picklable, that make the class again. Where several
meet, the captured class is outermost.
"""

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

from .signature import Signature
from .source import Code

__all__ = ["class_recipe", "dynamic_class", "identity", "same_kind", "user_class"]

_Key = tuple[type, str, tuple[tuple[str, int], ...]]
_serial = itertools.count(1)
_classes: weakref.WeakValueDictionary[_Key, type[nn.Module]] = weakref.WeakValueDictionary()


def user_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the user's class under a dynamic one; any other class is its own."""
    return getattr(cls, "_fxopt_base", cls)


def same_kind(one: object, other: object) -> bool:
    """Say whether two values are modules of one class, but for what was made of it on the fly."""
    if not isinstance(one, nn.Module) or not isinstance(other, nn.Module):
        return False
    return user_class(type(one)) is user_class(type(other))


def identity(cls: type[nn.Module]) -> type[nn.Module]:
    """Return `cls`: how to make a class that pickles by name."""
    return cls


def class_recipe(cls: type[nn.Module]) -> tuple[Callable[..., type[nn.Module]], tuple[Any, ...]]:
    """Return a function and arguments, all picklable, that make `cls` again."""
    return getattr(cls, "_fxopt_recipe", (identity, (cls,)))


def dynamic_class(
    base: type[nn.Module],
    mixin: type,
    source: Code | None,
    signature: Signature | None,
    attributes: dict[str, Any],
) -> type[nn.Module]:
    """Return the subclass of `mixin` and `base` whose forward is `source`, named like `base`.

    The same base, text and objects give the same class, for as long as it is in use.
    """
    names = () if source is None else tuple(sorted((name, id(value)) for name, value in source.names.items()))
    key = (base, "" if source is None else source.text, names)
    known = _classes.get(key)
    if known is None:
        known = _classes[key] = _make(base, mixin, source, signature, attributes)
    return known


def _make(
    base: type[nn.Module],
    mixin: type,
    source: Code | None,
    signature: Signature | None,
    attributes: dict[str, Any],
) -> type[nn.Module]:
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__init__": _like(mixin.__init__, base.__init__),
        **attributes,
    }
    if source is not None and signature is not None:
        namespace["forward"] = _function(base, source, signature)
    return types.new_class(base.__name__, (mixin, base), exec_body=lambda body: body.update(namespace))


def _like(function: Any, model: Any) -> Any:
    """Return a copy of `function` that presents itself as `model`."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    return functools.wraps(model)(copy)


def _function(base: type[nn.Module], source: Code, signature: Signature) -> Any:
    filename = f"<fxopt {base.__qualname__}.forward {next(_serial)}>"
    names = dict(source.names)
    # The text was generated from a graph by tracing/source.py; every foreign object is a name, not text.
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

"""Stand for a class while forwards are traced: instances are made through the tracer, all else is the class's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["class_proxy"]

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

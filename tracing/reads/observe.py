"""See which plain attributes of a module its forward reads: their values become part of the graph."""

from __future__ import annotations

import types
from collections.abc import Generator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...runtime.graphs import FOUND
from ...runtime.values import INTERNAL, Quiet, subclass

__all__ = ["FOUND", "INTERNAL", "Observers", "Quiet", "Seen"]

_INHERITED = frozenset(vars(nn.Module))
_REGISTRIES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class Seen:
    """Hold the names of all attributes read, of the plain values among them, and of those set on the class."""

    names: set[str]
    plain: set[str]
    set_on_class: set[str]


class Observers:
    """Make, once per class, a class that notes every attribute read, and lend it to a module."""

    def __init__(self, wrappers: Mapping[int, Any]) -> None:
        self._wrappers = wrappers
        self._classes: dict[type, type] = {}
        self._seen: set[str] = set()

    @property
    def seen(self) -> set[str]:
        """Return the names of the attributes read so far of the module that is observed."""
        return self._seen

    @contextmanager
    def observed(self, module: nn.Module) -> Generator[Seen]:
        """Collect which attributes of `module` are read inside; what is given back is filled in on leaving."""
        cls, previous, found = type(module), self._seen, Seen(set(), set(), set())
        self._seen = found.names
        lent = self._class(cls)
        object.__setattr__(module, "__class__", lent)
        own = frozenset(lent.__dict__)  # by its metaclass: abc.ABCMeta does
        try:
            yield found
        finally:
            object.__setattr__(module, "__class__", cls)
            found.plain.update(name for name in found.names if _is_plain(module, name))
            found.set_on_class.update(_taken_off(lent, own))
            self._seen = previous

    def _class(self, cls: type) -> Any:
        known = self._classes.get(cls)
        if known is None:
            known = self._classes[cls] = subclass(cls, (Quiet,), lambda: self._body(cls))
        return known

    def _body(self, cls: type) -> dict[str, Any]:
        read: Any = cls.__getattribute__

        def __getattribute__(module: Any, name: str) -> Any:  # noqa: N807
            self._seen.add(name)
            value = read(module, name)
            return self._wrappers.get(id(value), value) if type(value) is types.FunctionType else value

        return {"__getattribute__": __getattribute__}


def _taken_off(cls: type, own: Set[str]) -> set[str]:
    """Take off a class that was lent what was set on it (`type(self).calls += 1`), and return the names."""
    names = {name for name in vars(cls).keys() - own if not name.startswith(("__", "_fxopt"))}
    for name in names:
        type.__delattr__(cls, name)
    return names


def _is_plain(module: nn.Module, name: str) -> bool:
    """Tell whether an attribute is a value that a graph would hold, or not there, and not a method, tensor or child."""
    if name in INTERNAL or name.startswith("_fxopt"):
        return False
    if name in module.__dict__:
        return not isinstance(module.__dict__[name], Tensor)
    if name in _INHERITED:
        return False
    for cls in type(module).__mro__:
        if name in cls.__dict__:
            value: object = cls.__dict__[name]
            return not callable(value) and not hasattr(type(value), "__get__")
    return all(module.__dict__[registry].get(name) is None for registry in _REGISTRIES)

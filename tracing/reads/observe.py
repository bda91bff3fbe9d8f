"""See which plain attributes of a module its forward reads, and how many modules its containers hold."""

from __future__ import annotations

import types
from collections.abc import Collection, Generator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from ...compat import own_children
from ...runtime.graphs import FOUND
from ...runtime.guards import SELF, Equals, Guard, Source, children_of, key_of, length_of, module_at
from ...runtime.values import CONTAINERS, INTERNAL, Quiet, counts_items, subclass

__all__ = ["FOUND", "INTERNAL", "OWN_CHILDREN", "Observers", "Quiet", "Seen", "container_lengths", "listing_of"]


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


_WHOLE = frozenset("_modules children modules named_children named_modules parameters named_parameters".split())
"""Attributes through which a forward may loop over all of its children."""

OWN_CHILDREN = length_of(children_of(SELF))
"""The number of a module's children."""


def listing_of(module: nn.Module, source: Source = SELF) -> Source:
    """Return what has the items that a loop over a module's children comes across, where `source` is the module."""
    return source if counts_items(type(module)) else children_of(source)


def container_lengths(module: nn.Module, graph: fx.Graph, read: Collection[str]) -> list[Guard]:
    """Return guards on the number of items in each container that a forward went through: loops are unrolled."""
    guards: dict[str, Guard] = {}
    seen: set[str] = set()
    if not _WHOLE.isdisjoint(read):
        count = len(own_children(module))
        guards[""] = Guard(length_of(listing_of(module)), Equals(key_of(count)), f"it has {count} items")
    for node in graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        parts = str(node.target).split(".")
        for depth in range(1, len(parts)):
            path = ".".join(parts[:depth])
            if path in seen:
                continue
            seen.add(path)
            container = module.get_submodule(path)
            if isinstance(container, (*CONTAINERS, nn.Sequential)):
                items = module_at(parts[:depth])
                if not isinstance(container, (nn.ParameterList, nn.ParameterDict)):
                    items = listing_of(container, items)
                count = key_of(len(container))
                guards[path] = Guard(length_of(items), Equals(count), f"{path} has {count} items")
    return list(guards.values())

"""See what a forward reads from plain objects that its module holds, such as a configuration: each value is guarded."""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from ...runtime.guards import (
    SELF,
    Applied,
    Attribute,
    Dictionary,
    Equals,
    Guard,
    Is,
    Known,
    Lacks,
    Source,
    exactly,
    is_tensor,
    item_of,
    key_of,
    length_of,
    module_at,
    of_class,
    same_type,
)
from ...runtime.values import INTERNAL, Quiet, parts_of, subclass
from .bytecode import Read, Use, Variable, uses_in
from .reached_code import class_attribute

__all__ = ["NestedReads", "items_of"]

_LONGEST = 64
"""Items of a container that guards compare."""
_DEEPEST = 3
"""Containers in containers that are looked into."""


class NestedReads:
    """Lend a noting class to the plain objects in a module's attributes, and to those inside them that are read."""

    def __init__(self, module: nn.Module, names: Callable[[], Mapping[int, str]]) -> None:
        self._module, self._names = module, names
        self._places: dict[int, tuple[str, Source]] = {}
        """Of each object that is lent: the module's attribute that leads to it, and how."""
        self._lent: list[tuple[Any, type]] = []
        self.arrays: list[tuple[str, Source, Any]] = []
        """What was read that is numpy's, each with the attribute that leads there, and how: no guard compares it."""
        self._read: dict[Guard, str] = {}
        """A condition on what was read -> the attribute that leads there ("" for a child's own)."""
        self.compared: set[str] = set()
        """Attributes of which guards say all that there is to say: graphs read the tensors in them anew each time."""

    @contextmanager
    def noted(self) -> Generator[None]:
        """Note what is read inside."""
        try:
            for name, value in list(self._module.__dict__.items()):
                if name not in INTERNAL:
                    self._lend(value, name, Attribute(SELF, name))
            yield
        finally:
            while self._lent:
                value, cls = self._lent.pop()
                object.__setattr__(value, "__class__", cls)

    def note_inside(self, path: str, name: str, value: Any) -> None:
        """Note that a plain attribute of a module inside, at `path`, is read."""
        self._note(value, "", Attribute(module_at(path.split(".")), name))

    def keep(self, guard: Guard | None) -> None:
        """Note a condition on the modules inside, if there is one."""
        if guard is not None:
            self._keep(guard, "")

    def guards(self, plain: set[str]) -> list[Guard]:
        """Return conditions under which the same is read again; `plain` are the own attributes that were read."""
        attributes = self._module.__dict__
        for name in sorted(plain):
            value, source = attributes.get(name), Attribute(SELF, name)
            if _holds_tensors_only(value):
                self._keep(same_type(source, value, f"{source} is a {type(value).__name__}"), name)
                self.compared.add(name)
            if type(value) in (*_MUTABLE, tuple) or _is_array(value):
                self._note(value, name, source)
        return [guard for guard, root in self._read.items() if not root or root in plain]

    def _lend(self, value: Any, root: str, source: Source, depth: int = _DEEPEST) -> None:
        for key, held in items_of(value) if depth else ():
            self._lend(held, root, item_of(source, key), depth - 1)
        cls = cast("type[Any]", type(value))
        if id(value) in self._places or not _can_be_lent(value):
            return
        noting = subclass(cls, (Quiet,), lambda: self._body(cls))
        self._places[id(value)] = root, source
        try:
            object.__setattr__(value, "__class__", noting)
        except TypeError:  # its layout does not allow another class: all that it holds is noted
            self._note_all(cast("dict[str, Any]", vars(value)), root, source)
            return
        self._lent.append((value, cls))

    def _body(self, cls: type) -> dict[str, Any]:
        read: Any = cls.__getattribute__

        def __getattribute__(holder: Any, name: str) -> Any:  # noqa: N807
            root, source = self._places.get(id(holder), ("", None))
            if source is None or name.startswith("__"):
                return read(holder, name)
            try:
                value = read(holder, name)
            except AttributeError:
                self._keep(Guard(Dictionary(source), Lacks(key_of(name)), f"{source} has no {name}"), root)
                raise
            direct = self._direct(cls, cast("dict[str, Any]", vars(holder)), name, value, (root, source))
            self._note(value, root, direct or Attribute(source, name))
            return value

        return {"__getattribute__": __getattribute__}

    def _direct(
        self, cls: type, held: dict[str, Any], name: str, value: Any, place: tuple[str, Source]
    ) -> Source | None:
        """Return how a guard reads an attribute from its object's dictionary, in a tenth of the time; else None."""
        root, source = place
        key = _key(cls, name)
        if key is None or held.get(key, self) is not value:
            return None
        if source != Attribute(SELF, root):  # what is set on the module itself is noticed
            self._keep(of_class(source, cls, f"{source} is a {cls.__qualname__}"), root)
        return item_of(Dictionary(source), key)

    def _note_all(self, held: dict[str, Any], root: str, source: Source) -> None:
        self._note(tuple(held), root, Applied(tuple, (Dictionary(source),)))
        for name, value in held.items():
            self._note(value, root, item_of(Dictionary(source), name))

    def _note(self, value: Any, root: str, source: Source, depth: int = _DEEPEST) -> None:
        """Note a value that is read: itself, or, where it has no spelling, what is in it."""
        guards = exactly(source, value)
        for guard in guards:
            self._keep(guard, root)
        if guards:
            return
        if _is_named_function(value):
            self._keep(Guard(source, Is(Known(value)), f"{source} is {value.__name__}"), root)
            return
        if cast("type[Any]", type(value)).__module__ == "numpy" or _is_array(value):
            self.arrays.append((root, source, value))
            return
        self._lend(value, root, source)
        items = items_of(value) if depth else []
        if items and type(value) is not tuple:
            keys = [key for key, _ in items]
            named = type(value) is dict and len(keys) == len(cast("dict[Any, Any]", value))
            counted, expected = (Applied(tuple, (source,)), tuple(keys)) if named else (length_of(source), len(items))
            compared = Known(expected) if any(isinstance(key, enum.Enum) for key in keys) else key_of(expected)
            self._keep(Guard(counted, Equals(compared), f"{source} has {len(items)} items"), root)
        for key, held in items:
            if isinstance(held, torch.Tensor):
                self._note_tensor(held, root, item_of(source, key))
            else:
                self._note(held, root, item_of(source, key), depth - 1)

    def _note_tensor(self, tensor: torch.Tensor, root: str, source: Source) -> None:
        """Note that a container holds a tensor; a parameter or buffer is known by its name from then on."""
        name = self._names().get(id(tensor))
        if name is None:
            self._keep(is_tensor(source, True, f"{source} is a tensor"), root)
            return
        *owners, last = name.split(".")
        registered = Applied(getattr, (module_at(owners), key_of(last), key_of(None)))
        self._keep(Guard(source, Is(registered), f"{source} is {name}"), root)

    def _keep(self, guard: Guard, root: str) -> None:
        self._read.setdefault(guard, root)


def _key(cls: type, name: str) -> str | None:
    """Return under which name objects of a class hold an attribute (a property has another); None if code decides."""
    found = class_attribute(cls, name)
    if not isinstance(found, property):
        return None if hasattr(cast("type[Any]", type(found)), "__set__") else name
    code = getattr(found.fget, "__code__", None)
    match uses_in(code) if isinstance(code, types.CodeType) else ():
        case [_, Use("RETURN_VALUE", taken=(Read(Variable("local"), key),))]:  # before it, the read itself
            return key
        case _:
            return None


def _is_array(value: Any) -> bool:
    """Tell whether a value is an array of numpy's."""
    kind = cast("type[Any]", type(value))
    return any(base.__module__ == "numpy" and base.__name__ == "ndarray" for base in kind.__mro__)


def _is_named_function(value: Any) -> bool:
    """Say whether a value is a function that a module of Python has by its name, and so is one in copies, too."""
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(value.__self__, (type, types.ModuleType))
    if not isinstance(value, types.FunctionType):
        return False
    return getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value


def _can_be_lent(value: Any) -> bool:
    """Say whether an object is a plain one: of a class written in Python, neither module nor function nor container."""
    cls = cast("type[Any]", type(value))
    if isinstance(
        value, (nn.Module, torch.Tensor, type, types.ModuleType, enum.Enum, int, str, list, tuple, dict, set)
    ):
        return False
    package = cls.__module__.partition(".")[0]
    return package not in ("torch", "builtins") and not callable(value) and hasattr(value, "__dict__")


_MUTABLE = (list, dict, set)


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the items of a short container, each with the key that leads there."""
    kind = cast("type[Any]", type(value))
    if kind not in (list, tuple, dict) or len(value) > _LONGEST:
        return []
    return [(key, item) for key, item in parts_of(value) if type(key) in (int, str) or isinstance(key, enum.Enum)]


def _holds_tensors_only(value: Any) -> bool:
    """Say whether a value is a short list or dictionary of tensors (a cache): another like it changes nothing."""
    items = items_of(value) if type(value) in (list, dict) else []
    return bool(items) and len(items) == len(value) and all(isinstance(item, torch.Tensor) for _, item in items)

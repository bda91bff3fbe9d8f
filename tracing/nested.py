"""See what a forward reads from plain objects that its module holds, such as a configuration: each value is guarded."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from .dynamic import subclass
from .expressions import literal
from .guards import Guard
from .observe import INTERNAL, Quiet
from .source import attribute_expression, module_expression

__all__ = ["NestedReads", "items_of", "spelled"]

_LONGEST = 64
"""Items of a container that guards compare."""
_DEEPEST = 3
"""Containers in containers that are looked into."""
_DIRECT = re.compile(r"\.__dict__\['(\w+)'\]")
"""How attributes are read from dictionaries; people are told of attributes."""


class NestedReads:
    """Lend a noting class to the plain objects in a module's attributes, and to those inside them that are read.

    Args:
        module: the traced module.
        names: returns id of a tensor -> its name, of all that are registered in the module or inside.
    """

    def __init__(self, module: nn.Module, names: Callable[[], Mapping[int, str]]) -> None:
        self._module, self._names = module, names
        self._places: dict[int, tuple[str, str]] = {}
        """Of each object that is lent: the module's attribute that leads to it, and how."""
        self._lent: list[tuple[Any, type]] = []
        self.arrays: list[tuple[str, str, Any]] = []
        """What was read that is numpy's, each with the attribute that leads there, and how: no guard compares it."""
        self._read: dict[str, tuple[str, str]] = {}
        """A condition on what was read -> the attribute that leads there ("" for a child's own), and the reason."""
        self.compared: set[str] = set()
        """Attributes of which guards say all that there is to say: graphs read the tensors in them anew each time."""

    @contextmanager
    def noted(self) -> Generator[None]:
        """Note what is read inside."""
        try:
            for name, value in list(self._module.__dict__.items()):
                if name not in INTERNAL:
                    self._lend(value, name, f"self.{name}")
            yield
        finally:
            while self._lent:
                value, cls = self._lent.pop()
                object.__setattr__(value, "__class__", cls)

    def note_inside(self, path: str, name: str, value: Any) -> None:
        """Note that a plain attribute of a module inside, at `path`, is read."""
        self._note(value, "", attribute_expression(module_expression(path.split(".")), name))

    def keep(self, condition: str, reason: str) -> None:
        """Note a condition on the modules inside."""
        self._keep(condition, "", reason)

    def guards(self, plain: set[str]) -> list[Guard]:
        """Return conditions under which the same is read again.

        Args:
            plain: the module's own attributes that were read; setting one is noticed, changing what is in it is not.
        """
        attributes = self._module.__dict__
        for name in sorted(plain):
            value = attributes.get(name)
            if _holds_tensors_only(value):
                self._keep(
                    f"type(self.{name}) is {type(value).__name__}", name, f"self.{name} is a {type(value).__name__}"
                )
                self.compared.add(name)
            if type(value) in (*_MUTABLE, tuple) or _is_array(value):
                self._note(value, name, f"self.{name}")
        return [
            Guard(condition, reason) for condition, (root, reason) in self._read.items() if not root or root in plain
        ]

    def _lend(self, value: Any, root: str, path: str, depth: int = _DEEPEST) -> None:
        for key, item in items_of(value) if depth else ():
            self._lend(item, root, f"{path}[{key!r}]", depth - 1)
        cls = cast("type[Any]", type(value))
        if id(value) in self._places or not _can_be_lent(value):
            return
        noting = subclass(cls, (Quiet,), lambda: self._body(cls))
        self._places[id(value)] = root, path
        try:
            object.__setattr__(value, "__class__", noting)
        except TypeError:  # its layout does not allow another class: all that it holds is noted
            self._note_all(cast("dict[str, Any]", vars(value)), root, path)
            return
        self._lent.append((value, cls))

    def _body(self, cls: type) -> dict[str, Any]:
        read: Any = cls.__getattribute__

        def __getattribute__(holder: Any, name: str) -> Any:  # noqa: N807
            root, path = self._places.get(id(holder), ("", ""))
            if not path or name.startswith("__"):
                return read(holder, name)
            try:
                value = read(holder, name)
            except AttributeError:
                self._keep(f"{name!r} not in {path}.__dict__", root, f"{path} has no {name}")
                raise
            expression = self._direct(cls, cast("dict[str, Any]", vars(holder)), name, value, (root, path))
            self._note(value, root, expression or attribute_expression(path, name))
            return value

        return {"__getattribute__": __getattribute__}

    def _direct(self, cls: type, held: dict[str, Any], name: str, value: Any, place: tuple[str, str]) -> str | None:
        """Return how a guard reads an attribute from the dictionary of its object, in a tenth of the time; else None.

        So it does not look like a tensor's, either: moving the model changes types and devices of those.
        """
        root, path = place
        if held.get(name, self) is not value:
            return None
        if not path.removeprefix("self.").isidentifier():  # what is set on the module itself is noticed
            self._keep(f"type({path}).__qualname__ == {cls.__qualname__!r}", root, f"{path} is a {cls.__qualname__}")
        return f"{path}.__dict__[{name!r}]"

    def _note_all(self, held: dict[str, Any], root: str, path: str) -> None:
        self._note(tuple(held), root, f"tuple({path}.__dict__)")
        for name, value in held.items():
            self._note(value, root, f"{path}.__dict__[{name!r}]")

    def _note(self, value: Any, root: str, expression: str, depth: int = _DEEPEST) -> None:
        """Note a value that is read: itself, or, where it has no spelling, what is in it."""
        text = spelled(value)
        if text is not None:
            self._keep(f"{expression} == {text}", root, f"{expression} is {text}")
            return
        if cast("type[Any]", type(value)).__module__ == "numpy" or _is_array(value):
            self.arrays.append((root, expression, value))
            return
        if type(value) is float:  # no number, or infinite
            self._keep(f"str({expression}) == {str(value)!r}", root, f"{expression} is {value}")
            return
        self._lend(value, root, expression)
        items = items_of(value) if depth else []
        if items and type(value) is not tuple:
            keys = [key for key, _ in items]
            named = type(value) is dict and len(keys) == len(cast("dict[Any, Any]", value))
            condition = f"list({expression}) == {keys!r}" if named else f"len({expression}) == {len(items)}"
            self._keep(condition, root, f"{expression} has {len(items)} items")
        for key, item in items:
            if isinstance(item, torch.Tensor):
                self._note_tensor(item, root, f"{expression}[{key!r}]")
            else:
                self._note(item, root, f"{expression}[{key!r}]", depth - 1)

    def _note_tensor(self, tensor: torch.Tensor, root: str, expression: str) -> None:
        """Note that a container holds a tensor; a parameter or buffer is known by its name from then on."""
        name = self._names().get(id(tensor))
        if name is None:
            self._keep(f"isinstance({expression}, Tensor)", root, f"{expression} is a tensor")
            return
        *owners, name = name.split(".")
        condition = f"{expression} is getattr({module_expression(owners)}, {name!r}, None)"
        self._keep(condition, root, f"{expression} is {'.'.join((*owners, name))}")

    def _keep(self, condition: str, root: str, reason: str) -> None:
        self._read.setdefault(condition, (root, _DIRECT.sub(r".\1", reason)))


def _is_array(value: Any) -> bool:
    """Tell whether a value is an array of numpy's."""
    kind = cast("type[Any]", type(value))
    return any(base.__module__ == "numpy" and base.__name__ == "ndarray" for base in kind.__mro__)


def _can_be_lent(value: Any) -> bool:
    """Say whether an object is a plain one: of a class written in Python, neither module nor function nor container."""
    cls = cast("type[Any]", type(value))
    if isinstance(value, (nn.Module, torch.Tensor, type, types.ModuleType, int, str, list, tuple, dict, set)):
        return False
    package = cls.__module__.partition(".")[0]
    return package not in ("torch", "builtins") and not callable(value) and hasattr(value, "__dict__")


_MUTABLE = (list, dict, set)


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the items of a short container, each with the key that leads there."""
    kind = cast("type[Any]", type(value))
    if kind not in (list, tuple, dict) or len(value) > _LONGEST:
        return []
    pairs = cast("dict[Any, Any]", value).items() if kind is dict else enumerate(cast("list[Any]", value))
    return [(key, item) for key, item in pairs if type(key) in (int, str)]


def _holds_tensors_only(value: Any) -> bool:
    """Say whether a value is a short list or dictionary of tensors (a cache): another like it changes nothing."""
    items = items_of(value) if type(value) in (list, dict) else []
    return bool(items) and len(items) == len(value) and all(isinstance(item, torch.Tensor) for _, item in items)


def spelled(value: Any) -> str | None:
    """Return Python for a plain value, or for a short container of such."""
    kind = cast("type[Any]", type(value))
    if kind not in _MUTABLE:
        return literal(value)
    if len(value) > _LONGEST:
        return None
    if kind is dict:
        pairs = [(spelled(key), spelled(item)) for key, item in cast("dict[Any, Any]", value).items()]
        return None if any(None in pair for pair in pairs) else f"{{{', '.join(f'{k}: {v}' for k, v in pairs)}}}"
    items = [spelled(item) for item in cast("list[Any]", value)]
    if None in items:
        return None
    written = ", ".join(sorted(map(str, items)) if kind is set else map(str, items))
    return f"[{written}]" if kind is list else f"{{{written}}}" if written else "{*()}"

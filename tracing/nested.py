"""See what a forward reads from plain objects that its module holds, such as a configuration: each value is guarded."""

from __future__ import annotations

import types
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from .expressions import literal
from .guards import Guard

__all__ = ["NestedReads"]

_LONGEST = 64
"""Items of a list or dict that a guard compares."""


class NestedReads:
    """Lend a noting class to the plain objects in a module's attributes, and to those inside them that are read."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._paths: dict[int, str] = {}
        self._lent: list[tuple[Any, type]] = []
        self._read: dict[str, Any] = {}

    @contextmanager
    def noted(self) -> Generator[None]:
        """Note what is read inside."""
        try:
            for name, value in self._module.__dict__.items():
                self._lend(value, f"self.{name}")
            yield
        finally:
            while self._lent:
                value, cls = self._lent.pop()
                object.__setattr__(value, "__class__", cls)

    def guards(self, plain: set[str]) -> list[Guard]:
        """Return conditions under which the same is read again.

        Args:
            plain: the module's own attributes that were read; setting one is noticed, changing what is in it is not.
        """
        attributes = self._module.__dict__
        held = {
            f"self.{name}": attributes[name] for name in sorted(plain) if type(attributes.get(name)) in (list, dict)
        }
        read = {e: value for e, value in self._read.items() if e.split(".")[1] in plain}
        found = ((expression, _spelled(value)) for expression, value in {**held, **read}.items())
        return [Guard(f"{e} == {text}", f"{e} is {text}") for e, text in found if text is not None]

    def _lend(self, value: Any, path: str) -> None:
        cls = cast("type[Any]", type(value))
        if id(value) in self._paths or not _can_be_lent(value):
            return
        noting = types.new_class(cls.__name__, (_Quiet, cls), exec_body=lambda body: body.update(self._namespace(cls)))
        try:
            object.__setattr__(value, "__class__", noting)
        except TypeError:  # its layout does not allow another class: all that it holds is noted
            self._read.setdefault(f"{path}.__dict__", dict(cast("dict[str, Any]", vars(value))))
            return
        self._paths[id(value)] = path
        self._lent.append((value, cls))

    def _namespace(self, cls: type) -> dict[str, Any]:
        read: Any = cls.__getattribute__

        def __getattribute__(holder: Any, name: str) -> Any:  # noqa: N807
            value = read(holder, name)
            path = self._paths.get(id(holder))
            if path is not None and not name.startswith("__"):
                self._note(f"{path}.{name}", value)
            return value

        return {"__getattribute__": __getattribute__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}

    def _note(self, expression: str, value: Any) -> None:
        if _spelled(value) is not None:
            self._read.setdefault(expression, value)
        else:
            self._lend(value, expression)


class _Quiet:
    """Keep the `__init_subclass__` of other people's classes from seeing the classes made here."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def _can_be_lent(value: Any) -> bool:
    """Say whether an object is a plain one: of a class written in Python, neither module nor function nor container."""
    cls = cast("type[Any]", type(value))
    if isinstance(value, (nn.Module, torch.Tensor, type, types.ModuleType, int, str, list, tuple, dict, set)):
        return False
    package = cls.__module__.partition(".")[0]
    return package not in ("torch", "builtins") and not callable(value) and hasattr(value, "__dict__")


def _spelled(value: Any) -> str | None:
    """Return Python for a plain value, or for a short list or dict of such."""
    kind = cast("type[Any]", type(value))
    if kind is list and len(value) <= _LONGEST:
        items = [_spelled(item) for item in cast("list[Any]", value)]
        return None if None in items else f"[{', '.join(map(str, items))}]"
    if kind is dict and len(value) <= _LONGEST:
        pairs = [(_spelled(key), _spelled(item)) for key, item in cast("dict[Any, Any]", value).items()]
        return None if any(None in pair for pair in pairs) else f"{{{', '.join(f'{k}: {v}' for k, v in pairs)}}}"
    return None if isinstance(value, (torch.dtype, torch.device, torch.Size)) else literal(value)

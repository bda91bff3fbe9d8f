"""Write plain values, and reads of attributes, as Python."""

from __future__ import annotations

import enum
import keyword
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

__all__ = ["attribute_text", "told_name", "written"]

_LONGEST = 64
"""Items of a container that guards compare."""
_MUTABLE = (list, dict, set)
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)


def attribute_text(owner: str, name: str) -> str:
    """Return Python that reads an attribute; a name need not be one that a dot takes (`lambda`, `0`)."""
    plain = name.isidentifier() and not keyword.iskeyword(name)
    return f"{owner}.{name}" if plain else f"getattr({owner}, {name!r})"


def written(value: Any, name: Callable[[object], str]) -> str | None:
    """Return Python for a plain value, or for a short container of such; None for any other."""
    kind = cast("type[Any]", type(value))
    if value is None or kind in (bool, int, str, bytes):
        return repr(value)
    if kind is float:
        return repr(value) if value - value == 0 else f"{name(float)}('{value}')" if value == value else None
    if isinstance(value, _OF_TORCH):
        return name(value)
    if isinstance(value, torch.device):
        return f"{name(torch.device)}('{value}')"
    return _written_container(value, kind, name)


def _written_container(value: Any, kind: type[Any], name: Callable[[object], str]) -> str | None:
    if kind not in (*_MUTABLE, tuple, torch.Size) or (kind in _MUTABLE and len(value) > _LONGEST):
        return None
    if kind is dict:
        pairs = [(written(k, name), written(v, name)) for k, v in cast("dict[Any, Any]", value).items()]
        return None if any(None in pair for pair in pairs) else f"{{{', '.join(f'{k}: {v}' for k, v in pairs)}}}"
    items = [written(item, name) for item in cast("Iterable[Any]", value)]
    if None in items:
        return None
    text = ", ".join(sorted(map(str, items)) if kind is set else map(str, items))
    if kind is set:
        return f"{{{text}}}" if text else "{*()}"
    return f"[{text}]" if kind is list else f"({text}{',' if len(items) == 1 else ''})"


def told_name(value: object) -> str:
    """Return what people call an object."""
    if isinstance(value, _OF_TORCH):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    name = getattr(value, "__name__", type(value).__name__)
    return f"torch.{name}" if getattr(torch, name, None) is value else name

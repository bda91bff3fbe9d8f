"""Notice what becomes of an inactive module: its class is the user's, which drops no graph when an attribute is set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

from ..values import PLAIN_TYPES, Absent, user_class

__all__ = ["FOUND", "is_unchanged", "note_found"]

FOUND = "_fxopt_found"
"""In the `__dict__` of an inactive module: the attributes that its graphs were made for, as they were then."""

_REGISTRIES = ("_modules", "_parameters", "_buffers")
_CONTAINERS = (list, dict, set)


def note_found(module: nn.Module, reads: Iterable[str]) -> None:
    """Keep what the attributes are that graphs of a module read, plain ones and children; copies have it, too."""
    module.__dict__[FOUND] = {name: _value(module, name) for name in sorted(reads)}


def is_unchanged(module: nn.Module, base: type[nn.Module]) -> bool:
    """Say whether the graphs of a module, of the class `base`, are those it would run from; an active one does."""
    found: dict[str, Any] | None = module.__dict__.get(FOUND)
    if found is None:
        return True
    return type(module) is base and all(_is_same(_value(module, name), value) for name, value in found.items())


def _value(module: nn.Module, name: str) -> Any:
    """Return an attribute; modules and tensors count by their kind."""
    attributes = module.__dict__
    if name in attributes:
        return attributes[name]
    for registry in _REGISTRIES:
        value: object = attributes[registry].get(name)
        if value is not None:
            return user_class(type(value)) if isinstance(value, nn.Module) else Tensor
    return Absent


def _is_same(now: Any, then: Any) -> bool:
    if now is then:
        return True
    kind = cast("type[Any]", type(now))
    if kind is not type(then):
        return False
    # A copy or a pickle keeps which objects are one, but for plain values and for what is empty.
    return now == then if kind in PLAIN_TYPES else kind in _CONTAINERS and not now and not then

"""Containers whose graphs call children that passes added, which `train()` reaches, but no loop over items."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ...compat import own_children
from ..values import counts_items, in_class, user_class

__all__ = ["EXTRA", "item_methods", "note_added", "note_removed"]

EXTRA = "_fxopt_extra"
"""In a container's `__dict__`: names of the children that are no items of it; passes added them for its graphs."""

_READING = ("__len__", "__iter__", "__contains__", "__getitem__", "keys", "items", "values")
_CHANGING = (
    "__setitem__", "__delitem__", "__iadd__", "__imul__", "append", "insert", "extend", "pop", "clear", "update",
)  # fmt: skip


def note_added(container: nn.Module, name: str) -> None:
    """Note that a child is none of a container's items."""
    container.__dict__[EXTRA] = container.__dict__.get(EXTRA, frozenset()) | {name}


def note_removed(container: nn.Module, name: str) -> bool:
    """Note that a child is taken out of a container, and say whether it was none of the items."""
    added = container.__dict__.pop(EXTRA, frozenset())
    if added - {name}:
        container.__dict__[EXTRA] = added - {name}
    return name in added


def item_methods(base: type[nn.Module]) -> dict[str, Any]:
    """Return the methods of a container's class with which it shows its items only; of other classes there are none."""
    if not counts_items(base):
        return {}
    kinds = ((_READING, _reading), (_CHANGING, _changing))
    return {name: wrap(getattr(base, name)) for names, wrap in kinds for name in names if hasattr(base, name)}


def _reading(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def read(self: nn.Module, *args: Any) -> Any:
        return method(_items_alone(self) if EXTRA in self.__dict__ else self, *args)

    return read


def _items_alone(container: nn.Module) -> nn.Module:
    """Return a container of the same items without what was added."""
    alone = in_class(container, user_class(type(container)))
    for name in container.__dict__[EXTRA]:
        own_children(alone).pop(name, None)
    return alone


def _changing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def change(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        children = own_children(self)
        apart = {name: children.pop(name) for name in self.__dict__.get(EXTRA, ()) if name in children}
        try:
            return method(self, *args, **kwargs)
        finally:
            own_children(self).update(apart)

    return change

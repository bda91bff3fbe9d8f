"""See which operations of a traced forward change what outlives the call, and whether that can be taken back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from ...runtime.values import (
    PLAIN_TYPES,
    ChangeCounts,
    Path,
    changed_paths,
    contents,
    is_object,
    state_of,
    tensors_within,
)
from .preserve import memory_of

__all__ = ["Change", "Changes", "Watch", "is_repeatable"]


@dataclass
class Change:
    """What an operation changed that outlives the call: by argument the `paths` in it, and attributes by their setters.
    It is `revocable` if that is all; `objects` or containers were given other contents, and not tensors only.
    """

    revocable: bool
    objects: bool = False
    paths: dict[fx.Node, list[Path]] = field(default_factory=dict[fx.Node, "list[Path]"])
    attributes: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


_HOLDING_NOTHING = frozenset((Tensor, slice, *PLAIN_TYPES))
"""What nothing is in: most arguments."""


class Watch:
    """Hold the state of some values, to see later what became of them."""

    def __init__(self, changes: Changes, values: list[Any]) -> None:
        self._changes = changes
        held = [value for value in values if type(value) not in _HOLDING_NOTHING]
        self._values = [value for value in held if _is_mutable(value)]
        self._states = [state_of(value) for value in self._values]
        plain = [value for value in values if type(value) is Tensor]
        self._tensors = ChangeCounts((*plain, *tensors_within(held)))
        outside = any(changes.is_outside(value) for value in self._values)
        self._roots = {node: contents(root) for node, root in changes.roots.items()} if outside else {}

    def changed(self) -> list[Any]:
        """Return the tensors, objects and containers that were changed in place."""
        pairs = zip(self._values, self._states, strict=True)
        return [*self._tensors.changed(), *(value for value, state in pairs if state_of(value) != state)]

    def lasting(self) -> Change | None:
        """Return what was changed that outlives the call, or None."""
        outside = [value for value in self.changed() if self._changes.is_outside(value)]
        if not outside:
            return None
        paths = {node: changed_paths(self._changes.roots[node], before) for node, before in self._roots.items()}
        paths = {node: found for node, found in paths.items() if found}
        tensors = [isinstance(value, Tensor) for value in outside]
        return Change(bool(paths) and not any(tensors), not all(tensors), paths)


class Changes:
    """Know which example values come from outside of the traced forward, and what belongs to them."""

    def __init__(self) -> None:
        self.roots: dict[fx.Node, Any] = {}
        self._storages: set[int] = set()
        self._outside: dict[int, Any] = {}

    def protect(self, value: Any, node: fx.Node | None = None) -> None:
        """Note a value that was there before the call, or that something else may hold; `node` is an argument."""
        tensors = (value,) if type(value) is Tensor else tensors_within(value)
        self._storages.update(map(memory_of, tensors))
        if _is_mutable(value):
            self._outside[id(value)] = value
            if node is not None:
                self.roots[node] = value

    def derive(self, value: Any, sources: Iterable[Any]) -> None:
        """Note a value that an operation gave: what is taken out of something outside is outside, too."""
        if _is_mutable(value) and any(id(source) in self._outside for source in sources):
            self._outside[id(value)] = value

    def is_outside(self, value: Any) -> bool:
        """Tell whether a value outlives the call."""
        return memory_of(value) in self._storages if isinstance(value, Tensor) else id(value) in self._outside


def _is_mutable(value: Any) -> bool:
    if type(value) in _HOLDING_NOTHING:
        return False
    return is_object(value) or isinstance(value, (list, set, Mapping))


def is_repeatable(holder: fx.Node, name: str) -> bool:
    """Tell whether setting an attribute of what a child returned can be done again: nothing has looked at it before."""
    reads = (user for user in holder.users if user.target is not setattr)
    return holder.op == "call_module" and all(user.target is getattr and user.args[1] != name for user in reads)

"""Tensors that modules hold, and that a forward may change in place: buffers, and those in plain attributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import Tensor, nn

from ...compat import own_buffers, version_of
from .names import INTERNAL

__all__ = ["ChangeCounts", "change_count", "held_tensors", "plain_tensors"]

_DEPTH = 3
"""Containers within containers are looked into down to this depth."""
_HOLDERS = frozenset((Tensor, list, tuple, dict))


def change_count(tensor: Tensor) -> int | None:
    """Return how often a tensor was changed in place; None for inference tensors, which do not count."""
    return None if tensor.is_inference() else version_of(tensor)


def plain_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in a module's attributes, and in containers there, that are not registered as its buffers."""
    attributes: dict[str, Any] = module.__dict__
    for name, value in attributes.items():
        if type(value) in _HOLDERS and name not in INTERNAL:
            yield from _within(value, _DEPTH)


def _within(value: Any, depth: int) -> Iterator[Tensor]:
    kind = cast("type[object]", type(value))
    if kind is Tensor:
        yield value
    elif depth and kind in _HOLDERS:
        for item in cast("dict[Any, Any]", value).values() if kind is dict else cast("list[Any]", value):
            yield from _within(item, depth - 1)


def held_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers of a module, and the tensors in its attributes and in containers there."""
    yield from (buffer for buffer in own_buffers(module).values() if buffer is not None)
    yield from plain_tensors(module)


class ChangeCounts:
    """Hold how often tensors were changed in place, to see which were since."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._counts = [(tensor, change_count(tensor)) for tensor in tensors]

    def changed(self) -> list[Tensor]:
        """Return the tensors that were changed."""
        return [tensor for tensor, count in self._counts if change_count(tensor) != count]

"""Which operations pick places from a tensor that holds one for each member."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ..inlining import Operation
from .packs import Selected

__all__ = ["is_one_of_several_places", "selected", "selection"]


def selected(operation: Operation) -> tuple[Operation, int, int] | None:
    """Return (source, dim, index) where `operation` is `source[..., index, ...]` with full slices elsewhere."""
    if operation.operator != "getitem" or len(operation.args) != 2 or not isinstance(operation.args[0], Operation):
        return None
    index = operation.args[1]
    parts = cast("tuple[Any, ...]", index if isinstance(index, tuple) else (index,))
    places = [i for i, part in enumerate(parts) if isinstance(part, int) and not isinstance(part, bool)]
    others = [part for part in parts if not isinstance(part, int)]
    if len(places) != 1 or not _keeps_everything(others) or not _is_tensor(operation.args[0]):
        return None
    if others and others[0] is Ellipsis:
        return (operation.args[0], places[0] - len(parts), parts[places[0]])
    return operation.args[0], places[0], parts[places[0]]


def is_one_of_several_places(operation: Operation) -> bool:
    """Say whether a member picks its own place from an attribute of which other places are picked, too."""
    picked = selected(operation)
    if picked is None or picked[0].kind != "get_attr":
        return False
    others = (selected(user) for user in picked[0].users)
    return any(other is not None and other[2] != picked[2] for other in others)


def _keeps_everything(parts: Sequence[object]) -> bool:
    if any(part is Ellipsis for part in parts):
        return len(parts) == 1
    return all(part == slice(None) for part in parts)


def _is_tensor(operation: Operation) -> bool:
    return operation.kind == "get_attr" or hasattr(operation.example, "dtype")


def selection(column: Sequence[Operation]) -> Selected | None:
    """Return the tensor of which the members pick the places 0, 1, ... in order, or None."""
    picks = [selected(operand) for operand in column]
    first = picks[0]
    if first is None or any(pick != (first[0], first[1], i) for i, pick in enumerate(picks)):
        return None
    return Selected(first[0], first[1])

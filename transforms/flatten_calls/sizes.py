"""Conditions of a graph on the sizes of what it is given, where that is computed in the graph around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from ...runtime.guards import Argument, Attribute, Constant, Equals, Guard, Item

__all__ = ["Size", "size_asked"]


@dataclass(frozen=True)
class Size:
    """What one of the sizes of a tensor is to be."""

    x: fx.Node
    index: int
    expected: int


def size_asked(guard: Guard, given: Mapping[str, Any]) -> Size | None:
    """Return what a condition such as `x.shape[-1] == 56` wants of an argument; None where it is on something else."""
    match guard:
        case Guard(
            source=Item(Attribute(Argument(name), "shape"), Constant(value=int() as index)),
            check=Equals(Constant(value=int() as expected)),
        ):
            x = given.get(name)
            return Size(x, index, expected) if isinstance(x, fx.Node) else None
        case _:
            return None

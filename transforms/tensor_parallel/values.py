"""What a value is while a model is split over processes: whole, or this process's part of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import fx

from ...tracing.examples import TensorMeta

__all__ = ["Block", "Part", "PartSize", "Stop", "parts_in", "shape_of", "sizes_of"]


class Stop(Exception):
    """A value that is split reaches what has to have the whole of it; the message says what."""

    def __init__(self, reason: str, *, is_near: bool = True) -> None:
        super().__init__(reason)
        self.is_near = is_near


@dataclass(eq=False)
class Block:
    """Layers that are split together, because their results meet."""

    columns: list[str]  # names of the layers that are split by outputs, and of those after them, by inputs
    rows: list[str]
    stop: Stop | None = None  # why it cannot be split after all
    joined: Block | None = None  # the block that has taken this one in

    @property
    def whole(self) -> Block:
        """Return the block that this one is a part of by now."""
        return self if self.joined is None else self.joined.whole

    def take(self, other: Block) -> Block:
        """Join two blocks."""
        one, two = self.whole, other.whole
        if one is not two:
            one.columns += two.columns
            one.rows += two.rows
            one.stop = one.stop or two.stop
            two.joined = one
        return one


@dataclass(frozen=True)
class Part:
    """A tensor of which each process has a part."""

    dim: int  # along which it is split, counted from the last: -1
    block: Block  # which layers did it


@dataclass(frozen=True)
class PartSize:
    """A number that differs from that of one process: the size of a part."""

    block: Block


def parts_in(value: Any) -> Iterator[Part | PartSize]:
    """Yield what is split in a value."""
    if isinstance(value, (Part, PartSize)):
        yield value
    elif isinstance(value, Mapping):
        yield from parts_in(list(cast("Mapping[Any, Any]", value).values()))
    elif isinstance(value, (tuple, list)):
        for item in cast("list[Any]", value):
            yield from parts_in(item)
    elif isinstance(value, slice):
        yield from parts_in((value.start, value.stop, value.step))


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Return the shape of a node's value in one process, where it is a tensor."""
    meta = node.meta.get("val") if isinstance(node, fx.Node) else None
    return meta.shape if isinstance(meta, TensorMeta) else None


def sizes_of(shape: tuple[int, ...], part: Part) -> tuple[PartSize | None, ...]:
    """Return the shape of a part, as a value."""
    return tuple(PartSize(part.block) if dim - len(shape) == part.dim else None for dim in range(len(shape)))


def position_after(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> int | None:
    """Return the dimension of a reshaped tensor that a dimension has become the outer part of, or that is its own."""
    outside = math.prod(before[:dim])
    for position, size in enumerate(after):
        if math.prod(after[:position]) == outside and size > 1:
            fits = size % before[dim] == 0 or before[dim] % size == 0
            return position if fits else None
    return None

"""What a value is while a model is split over processes: a part of a tensor, of which layers, along which dimension."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

__all__ = [
    "SplitAxis", "SplitBlock", "SplitSize", "SplitTensor", "Stop", "joined", "parts_in", "settled", "sizes_of",
]  # fmt: skip

Numbers = dict[str, dict[str, dict[str, list[Any]]]]
"""By module, number of its graph and node: which numbers are others for a part, each by its path in the arguments."""


class Stop(Exception):
    """A value that is split reaches what has to have the whole of it; the message says what."""

    def __init__(self, reason: str, *, is_near: bool = True, is_uneven: bool = False) -> None:
        super().__init__(reason)
        self.is_near, self.is_uneven = is_near, is_uneven  # whether all but a reason, or a number, fits


@dataclass(eq=False)
class SplitBlock:
    """Layers that are split together, because their results meet."""

    columns: list[str]  # names of the layers that are split by outputs, and of those after them, by inputs
    rows: list[str]
    stop: Stop | None = None  # why it cannot be split after all
    joined: SplitBlock | None = None  # the block that has taken this one in
    numbers: Numbers = field(default_factory=dict[str, dict[str, dict[str, list[Any]]]])
    # of layers whose outputs are several parts, of which each process gets a share: how large these are
    sections: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    one_head: str = ""  # the node, if any, whose shape says that a layer's outputs are one head

    @property
    def whole(self) -> SplitBlock:
        """Return the block that this one is a part of by now."""
        return self if self.joined is None else self.joined.whole

    def take(self, other: SplitBlock) -> SplitBlock:
        one, two = self.whole, other.whole
        if one is not two:
            one.columns += two.columns
            one.rows += two.rows
            one.stop = one.stop or two.stop
            one.one_head = one.one_head or two.one_head
            two.joined = one
        return one

    @property
    def layers(self) -> list[str]:
        return [*self.columns, *self.rows]

    def data(self) -> dict[str, Any]:
        """Return what to do, as plain values."""
        more = {"numbers": self.numbers, "sections": self.sections}
        return {"columns": self.columns, "rows": self.rows} | {name: value for name, value in more.items() if value}


@dataclass(eq=False)
class SplitAxis:
    """The outputs of layers, in which parts code reads them: each process gets the same share of each part."""

    size: int  # of all of it
    prefers_sections: bool = False  # of a dimension that is made of it, whether the outer one counts parts
    has_choice: bool = False  # whether that was asked, and both would do
    readings: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])  # from where to where
    joined: SplitAxis | None = None  # the axis that has taken this one in

    @property
    def whole(self) -> SplitAxis:
        """Return the axis that this one is the same as by now."""
        return self if self.joined is None else self.joined.whole

    def read(self, start: int, end: int) -> None:
        """Note that code reads such a part by itself; Stop where others read it otherwise."""
        whole = self.whole
        if any(start < high and low < end and (low, high) != (start, end) for low, high in whole.readings):
            raise Stop("parts of its outputs are read that overlap")
        whole.readings.add((start, end))

    def take(self, other: SplitAxis) -> SplitAxis:
        one, two = self.whole, other.whole
        if one is not two:
            two.joined = one
            one.prefers_sections |= two.prefers_sections
            one.has_choice |= two.has_choice
            for start, end in two.readings:
                one.read(start, end)
        return one

    def sections(self) -> list[int]:
        """Return how large the parts are, in their order."""
        whole = self.whole
        places = sorted({0, whole.size, *(place for reading in whole.readings for place in reading)})
        return [end - start for start, end in pairwise(places)]


@dataclass(frozen=True)
class SplitTensor:
    """A tensor of which each process has a part."""

    dim: int  # along which it is split, counted from the last: -1
    block: SplitBlock  # which layers did it
    axis: SplitAxis | None = None  # where that dimension is all outputs of layers


@dataclass(frozen=True)
class SplitSize:
    """A number that differs from that of one process: the size of a part."""

    block: SplitBlock


def parts_in(value: Any) -> Iterator[SplitTensor | SplitSize]:
    """Yield what is split in a value."""
    if isinstance(value, (SplitTensor, SplitSize)):
        yield value
    elif isinstance(value, Mapping):
        yield from parts_in(list(cast("Mapping[Any, Any]", value).values()))
    elif isinstance(value, (tuple, list)):
        for item in cast("list[Any]", value):
            yield from parts_in(item)
    elif isinstance(value, slice):
        yield from parts_in((value.start, value.stop, value.step))


def sizes_of(shape: tuple[int, ...], part: SplitTensor) -> tuple[SplitSize | None, ...]:
    """Return the shape of a part, as a value."""
    return tuple(SplitSize(part.block) if dim - len(shape) == part.dim else None for dim in range(len(shape)))


def settled(part: SplitTensor) -> SplitTensor:
    """Return the part of a tensor whose dimension is read as it is, neighbours together."""
    if part.axis is None:
        return part
    part.axis.read(0, part.axis.whole.size)
    return replace(part, axis=None)


def joined(first: SplitTensor, others: list[SplitTensor]) -> SplitTensor:
    """Return what comes of tensors that are computed with each other, element by element along the dimension."""
    for other in others:
        first.block.take(other.block)
        if first.axis is not None and other.axis is not None:
            first.axis.take(other.axis)
        else:
            settled(other)
            first = settled(first) if other.axis is None else first
    return first

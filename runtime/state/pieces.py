"""Parts of tensors, and the memory that they go to: what is read of a checkpoint that no process reads whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Piece"]


@dataclass(frozen=True)
class Piece:
    """The part of the tensor called `name` that begins at `start`, and the memory for it, which has its shape."""

    name: str
    start: tuple[int, ...]
    memory: Tensor

    @property
    def index(self) -> tuple[slice, ...]:
        """Return the index by which the part is taken from the whole."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.memory.shape, strict=True))

    def members(self, names: Sequence[str]) -> list[Piece]:
        """Return the parts of tensors that are stacked."""
        first, *inside = self.start
        return [
            Piece(names[first + number], tuple(inside), memory) for number, memory in enumerate(self.memory.unbind(0))
        ]

    def neighbours(self, names: Sequence[str], sizes: Sequence[int], dim: int) -> list[Piece]:
        """Return the parts of tensors that lie behind one another along a dimension, where they are `sizes` long."""
        found: list[Piece] = []
        begin, end, at = self.start[dim], self.start[dim] + self.memory.shape[dim], 0
        for name, size in zip(names, sizes, strict=True):
            low, high = max(begin, at), min(end, at + size)
            if low < high:
                start = (*self.start[:dim], low - at, *self.start[dim:][1:])
                found.append(Piece(name, start, self.memory.narrow(dim, low - begin, high - low)))
            at += size
        return found

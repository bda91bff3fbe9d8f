"""The indices of tensors, joined where they must go together, fixed where they must stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["FIXED", "Array", "IndexClasses", "Solution"]

Array = NDArray[np.int64]

FIXED = 0
"""The atom of every index that stays."""


class IndexClasses:
    """Hand out atoms, and note what is said of them; `solve` works out what follows. The reason for what is said is the
    `operator` that runs meanwhile, and the `module` that it runs in.
    """

    def __init__(self) -> None:
        self.count = 1
        self.operator = self.module = ""
        self._reasons: list[str] = []
        self._edges: list[tuple[Array, Array]] = []
        self._fixed: list[Array] = []
        self._undecided: dict[bytes, Array] = {}

    @property
    def why(self) -> str:
        """Return the operation that runs, with its place."""
        return f"{self.operator} in {self.module or 'the model itself'}"

    def new(self, size: int) -> Array:
        """Return atoms for the indices along a dimension."""
        first, self.count = self.count, self.count + size
        return np.arange(first, self.count, dtype=np.int64)

    def join(self, left: Array, right: Array, why: str = "") -> None:
        """Say that atoms go together, one by one."""
        if left is right:
            return
        left, right = np.broadcast_arrays(left, right)
        left, right = left.ravel(), right.ravel()
        differ = left != right
        left, right = left[differ], right[differ]
        one_is_fixed = (left == FIXED) | (right == FIXED)
        self.fix(np.maximum(left, right)[one_is_fixed], why)
        if not one_is_fixed.all():
            self._edges.append((left[~one_is_fixed], right[~one_is_fixed]))

    def join_along(self, block: Array, axis: int, why: str = "") -> Array:
        """Say that all indices along an axis go together; return the block without it."""
        first = block.take([0], axis)
        self.join(block, first, why)
        return first.squeeze(axis)

    def fix(self, atoms: Array, why: str = "") -> None:
        """Say that atoms stay."""
        if atoms.size:
            self._fixed.append(atoms.ravel())
            self._reasons.append(why or self.why)

    def undecided(self, block: Array) -> None:
        """Note a block of several dimensions, of which one will be cut: which is decided in the end."""
        self._undecided.setdefault(block.tobytes() + bytes(block.shape), block)

    def solve(self) -> Solution:
        """Work out which atoms go together, and which stay."""
        parents = np.arange(self.count, dtype=np.int64)
        _merge(parents, self._edges)
        decided = [pair for block in self._undecided.values() for pair in _decided(block, parents)]
        _merge(parents, decided)
        self._edges += decided
        reasons = np.full(self.count, -1, dtype=np.int64)
        for number, atoms in reversed(list(enumerate(self._fixed))):
            reasons[parents[atoms]] = number
        reasons = reasons[parents]
        reasons[FIXED] = 0
        return Solution(parents, reasons, self._reasons)


@dataclass(frozen=True)
class Solution:
    """Which atoms go together (atom -> the least of them) and which stay (atom -> the number of the reason, or -1)."""

    units: Array
    fixed: Array
    reasons: Sequence[str]

    def of(self, atoms: Array) -> Array:
        """Return the units of atoms; `FIXED` for what stays."""
        return np.where(self.fixed[atoms] >= 0, FIXED, self.units[atoms])

    def line(self, block: Array, axis: int) -> Array:
        """Return the units along an axis of a block; all are `FIXED` where another axis is the one that is cut."""
        units = self.of(block)
        if units.ndim == 1:
            return units
        if (units == units.take([0], axis)).all():
            return np.zeros(len(np.moveaxis(units, axis, 0)), dtype=np.int64)
        least: Array = np.minimum.reduce(units, axis=tuple(other for other in range(units.ndim) if other != axis))
        return least


def _merge(parents: Array, edges: Sequence[tuple[Array, Array]]) -> None:
    """Let each atom point to the least one that it is joined with."""
    if not edges:
        return
    left, right = (np.concatenate(side) for side in zip(*edges, strict=True))
    while True:
        a, b = parents[left], parents[right]
        differ = a != b
        if not differ.any():
            return
        left, right, a, b = left[differ], right[differ], a[differ], b[differ]
        np.minimum.at(parents, np.maximum(a, b), np.minimum(a, b))
        while not ((further := parents[parents]) == parents).all():
            parents[:] = further


def _decided(block: Array, parents: Array) -> list[tuple[Array, Array]]:
    """Return what joins all axes of a block but the one that is cut: the one that leaves most units."""
    units = parents[block]
    lines = [np.moveaxis(units, axis, 0).reshape(units.shape[axis], -1) for axis in range(units.ndim)]
    if any((line == line[:, :1]).all() for line in lines):
        return []
    axis = max(range(units.ndim), key=lambda axis: (len(np.unique(lines[axis][:, 0])), -axis))
    line = np.moveaxis(block, axis, 0).reshape(block.shape[axis], -1)
    return [(line.ravel(), np.broadcast_to(line[:, :1], line.shape).ravel())]

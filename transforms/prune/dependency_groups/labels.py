"""The indices of tensors, joined where they go together, fixed where they stay; and how they move with shapes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["FIXED", "Array", "Block", "IndexClasses", "Labels", "Solution"]

Array = NDArray[np.int64]

FIXED = 0
"""The atom of every index that stays."""


class IndexClasses:
    """Hand out atoms, and note what is said of them because of the `operator` that runs; `solve` says what follows."""

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
        self._undecided.setdefault(block.tobytes() + repr(block.shape).encode(), block)

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


_LARGEST = 5_000_000
"""Merged dimensions with more indices than this stay as they are: nothing real has a width of millions."""


@dataclass(frozen=True)
class Block:
    """Indices over one dimension, or over several that were one before and may be one again (heads and their width)."""

    dims: tuple[int, ...]
    atoms: Array
    zero: bool = True  # whether the value is zero wherever the tensors that are cut are

    def at(self, dims: Iterable[int]) -> Block:
        """Return the block under other dimensions, in any order."""
        named = tuple(dims)
        order = sorted(range(len(named)), key=named.__getitem__)
        return replace(self, dims=tuple(named[i] for i in order), atoms=self.atoms.transpose(order))

    def without(self, dims: Collection[int], atoms: IndexClasses, why: str = "") -> Block | None:
        """Return the block where some dimensions stay whole; None if all of them do."""
        kept = tuple(dim for dim in self.dims if dim not in dims)
        if not kept:
            atoms.fix(self.atoms, why)
            return None
        values = self.atoms
        for axis in reversed(range(len(self.dims))):
            if self.dims[axis] in dims:
                values = atoms.join_along(values, axis, why)
        return Block(kept, values, self.zero)

    def normal(self) -> Block:
        """Return the block without dimensions along which nothing differs: these stay whole."""
        atoms, dims = self.atoms, list(self.dims)
        if not atoms.size:
            return Block((), atoms)
        for axis in reversed(range(len(dims))):
            if len(dims) > 1 and (atoms == atoms.take([0], axis)).all():
                atoms = np.asarray(atoms.take(0, axis))
                del dims[axis]
        if len(dims) == 1 and (atoms == FIXED).all():
            return Block((), np.empty(0, dtype=np.int64))
        return Block(tuple(dims), atoms, self.zero)


@dataclass(frozen=True)
class Labels:
    """What a value's indices are; a dimension in no block stays whole, and no two blocks share one."""

    shape: tuple[int, ...]
    blocks: tuple[Block, ...] = ()
    spoilt: Array | None = None  # atoms that must stay if the value is ever read

    def of(self, dim: int) -> Block | None:
        return next((block for block in self.blocks if dim in block.dims), None)

    def line(self, dim: int, atoms: IndexClasses) -> Block | None:
        """Return the block of a dimension by itself: the others in its block stay whole."""
        block = self.of(dim)
        return None if block is None else block.without([each for each in block.dims if each != dim], atoms)

    def whole(self, dims: Collection[int], atoms: IndexClasses, why: str = "") -> Labels:
        """Return the labels where some dimensions stay whole: those that share a block with another leave it."""
        blocks = (block.without(dims, atoms, why) for block in self.blocks)
        return replace(self, blocks=tuple(block for block in blocks if block is not None))

    def without(self, dim: int) -> Labels:
        """Return the labels without the block over a dimension."""
        return Labels(self.shape, tuple(block for block in self.blocks if dim not in block.dims))

    def moved(self, shape: Sequence[int], dims: Sequence[int | None]) -> Labels:
        """Return the labels of a value of `shape` whose dimension `dims[i]` was `i`; what stayed whole may be gone."""
        blocks = [
            block.at([d for d in (dims[old] for old in block.dims) if d is not None])
            for block in self.blocks
            if all(dims[old] is not None for old in block.dims)
        ]
        return Labels(tuple(shape), tuple(blocks))

    def taken(self, shape: Sequence[int], dim: int, indices: slice | Array) -> Labels:
        """Return the labels of some of the indices along a dimension."""
        blocks = list(self.blocks)
        for number, block in enumerate(blocks):
            if dim in block.dims:
                where = [slice(None)] * len(block.dims)
                where[block.dims.index(dim)] = indices  # type: ignore[call-overload]
                blocks[number] = replace(block, atoms=block.atoms[tuple(where)]).normal()
        return Labels(tuple(shape), tuple(block for block in blocks if block.dims))

    def with_zero(self, zero: bool) -> Labels:
        """Return the labels of a value that is zero, or is not, where what is cut is zero."""
        return replace(self, blocks=tuple(replace(block, zero=zero) for block in self.blocks))

    def reshaped(self, shape: Sequence[int], atoms: IndexClasses) -> Labels:
        """Return the labels of the same elements in another shape; of blocks that become one run, the first stays."""
        runs = _matching(self.shape, shape)
        blocks: list[Block] = []
        taken: list[_Run] = []
        for block in sorted(self.blocks, key=lambda block: block.dims):
            mine = [run for run in runs if set(run[0]) & set(block.dims)]
            merging = [run for run in mine if len(run[0]) + len(run[1]) > 2]
            if not mine or any(run in taken for run in merging):
                atoms.fix(block.atoms)
                continue
            taken += merging
            renamed = replace(block, dims=tuple(dim for _, new in mine for dim in new))
            blocks.append(self._in_runs(block, mine, shape, atoms) if merging else renamed)
        return Labels(tuple(shape), tuple(block for block in blocks if block.dims))

    def _in_runs(self, block: Block, runs: Sequence[_Run], shape: Sequence[int], atoms: IndexClasses) -> Block:
        """Return a block under the dimensions that runs of dimensions become."""
        before = {dim: self.shape[dim] for old, _ in runs for dim in old}
        if math.prod(before.values()) > _LARGEST:
            atoms.fix(block.atoms)
            return Block((), block.atoms)
        wide = block.atoms.reshape([size if dim in block.dims else 1 for dim, size in before.items()])
        wide = np.broadcast_to(wide, list(before.values()))
        dims = tuple(dim for _, new in runs for dim in new)
        found = Block(dims, wide.reshape([shape[dim] for dim in dims]), block.zero).normal()
        if len(found.dims) > 1:
            atoms.undecided(found.atoms)
        return found


_Run: TypeAlias = "tuple[list[int], list[int]]"
"""Dimensions that become other ones."""


def _matching(before: Sequence[int], after: Sequence[int]) -> list[_Run]:
    """Return which runs of old dimensions become which runs of new ones; sizes of one belong to none."""
    pairs: list[_Run] = []
    old, new = [i for i, n in enumerate(before) if n != 1], [i for i, n in enumerate(after) if n != 1]
    i = j = 0
    while i < len(old) and j < len(new):
        left, right = [old[i]], [new[j]]
        a, b = before[old[i]], after[new[j]]
        while a != b:
            if a < b:
                i += 1
                left.append(old[i])
                a *= before[old[i]]
            else:
                j += 1
                right.append(new[j])
                b *= after[new[j]]
        pairs.append((left, right))
        i, j = i + 1, j + 1
    return pairs

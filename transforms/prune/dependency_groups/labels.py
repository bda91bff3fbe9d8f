"""Labels: the atoms of a value's indices, dimension by dimension, and how they move where a shape changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .index_classes import FIXED, Array, IndexClasses

__all__ = ["Block", "Labels"]

_LARGEST = 5_000_000
"""Merged dimensions with more indices than this stay as they are: nothing real has a width of millions."""


@dataclass(frozen=True)
class Block:
    """Indices over one dimension, or over several that were one before and may be one again (heads and their width).

    Attributes:
        dims: the dimensions, in order.
        atoms: of those shapes.
        zero: whether the value is zero wherever the tensors that are cut are zero.
    """

    dims: tuple[int, ...]
    atoms: Array
    zero: bool = True

    def at(self, dims: Iterable[int]) -> Block:
        """Return the block under other dimensions, in any order."""
        named = tuple(dims)
        order = sorted(range(len(named)), key=named.__getitem__)
        return replace(self, dims=tuple(named[i] for i in order), atoms=self.atoms.transpose(order))


@dataclass(frozen=True)
class Labels:
    """What a value's indices are; a dimension in no block stays whole.

    Attributes:
        shape: of the value.
        blocks: no two have a dimension in common.
        spoilt: atoms that must stay if the value is ever read.
    """

    shape: tuple[int, ...]
    blocks: tuple[Block, ...] = ()
    spoilt: Array | None = None

    def of(self, dim: int) -> Block | None:
        """Return the block over a dimension."""
        return next((block for block in self.blocks if dim in block.dims), None)

    def line(self, dim: int, atoms: IndexClasses, why: str) -> Block | None:
        """Return the block of a dimension by itself: the others in its block stay whole."""
        block = self.of(dim)
        if block is None or len(block.dims) == 1:
            return block
        values = block.atoms
        for axis in reversed(range(len(block.dims))):
            if block.dims[axis] != dim:
                values = atoms.join_along(values, axis, why)
        return Block((dim,), values, block.zero)

    def whole(self, dims: Iterable[int], atoms: IndexClasses, why: str) -> Labels:
        """Return the labels where some dimensions stay whole: those that share a block with another leave it."""
        blocks: list[Block] = []
        staying = set(dims)
        for block in self.blocks:
            kept = [dim for dim in block.dims if dim not in staying]
            if len(kept) == len(block.dims):
                blocks.append(block)
            elif not kept:
                atoms.fix(block.atoms, why)
            else:
                values = block.atoms
                for axis in reversed(range(len(block.dims))):
                    if block.dims[axis] in staying:
                        values = atoms.join_along(values, axis, why)
                blocks.append(Block(tuple(kept), values, block.zero))
        return replace(self, blocks=tuple(blocks))

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
                blocks[number] = normal(replace(block, atoms=block.atoms[tuple(where)]))
        return Labels(tuple(shape), tuple(block for block in blocks if block.dims))

    def with_zero(self, zero: bool) -> Labels:
        """Return the labels of a value that is zero, or is not, where what is cut is zero."""
        return replace(self, blocks=tuple(replace(block, zero=zero) for block in self.blocks))

    def reshaped(self, shape: Sequence[int], atoms: IndexClasses, why: str) -> Labels:
        """Return the labels of the same elements in another shape."""
        where: dict[int, int] = {}
        joint: list[tuple[list[int], list[int]]] = []
        for old, new in _matching(self.shape, shape):
            if len(old) == len(new) == 1:
                where[old[0]] = new[0]
            elif old:
                joint.append((old, new))
        kept = self._one_a_run(joint, atoms, why).blocks
        blocks = [_reshaped(block, self.shape, tuple(shape), where, joint, atoms, why) for block in kept]
        return Labels(tuple(shape), tuple(block for block in blocks if block.dims))

    def _one_a_run(self, joint: Sequence[tuple[list[int], list[int]]], atoms: IndexClasses, why: str) -> Labels:
        """Return the labels where no two blocks are merged into one dimension: the first is kept."""
        kept: list[Block] = []
        taken: set[int] = set()
        runs = {dim: number for number, (old, _) in enumerate(joint) for dim in old}
        for block in sorted(self.blocks, key=lambda block: block.dims):
            mine = {runs[dim] for dim in block.dims if dim in runs}
            if mine & taken:
                atoms.fix(block.atoms, why)
                continue
            taken |= mine
            kept.append(block)
        return replace(self, blocks=tuple(kept))


def normal(block: Block) -> Block:
    """Return a block without dimensions along which nothing differs: these stay whole."""
    atoms, dims = block.atoms, list(block.dims)
    if not atoms.size:
        return Block((), atoms)
    for axis in reversed(range(len(dims))):
        if len(dims) == 1:
            if dims and (atoms == FIXED).all():
                return Block((), np.empty(0, dtype=np.int64))
            break
        if (atoms == atoms.take([0], axis)).all():
            atoms = np.asarray(atoms.take(0, axis))
            del dims[axis]
    return Block(tuple(dims), atoms, block.zero)


def _reshaped(
    block: Block, before: tuple[int, ...], after: tuple[int, ...], where: dict[int, int],
    joint: Sequence[tuple[list[int], list[int]]], atoms: IndexClasses, why: str,
) -> Block:  # fmt: skip
    """Return one block under the dimensions of the new shape."""
    runs = [(old, new) for old, new in joint if set(old) & set(block.dims)]
    if not runs:
        return replace(block, dims=tuple(where[dim] for dim in block.dims))
    involved = sorted({*block.dims, *(dim for old, _ in runs for dim in old)})
    if math.prod(before[dim] for dim in involved) > _LARGEST:
        atoms.fix(block.atoms, why)
        return Block((), block.atoms)
    wide = block.atoms.reshape([before[dim] if dim in block.dims else 1 for dim in involved])
    wide = np.broadcast_to(wide, [before[dim] for dim in involved])
    dims: list[int] = []
    for dim in involved:
        run = next((new for old, new in runs if dim in old), None)
        dims += [where[dim]] if run is None else [d for d in run if d not in dims]
    found = normal(Block(tuple(dims), wide.reshape([after[dim] for dim in dims]), block.zero))
    if len(found.dims) > 1:
        atoms.undecided(found.atoms)
    return found


def _matching(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return which runs of old dimensions become which runs of new ones; sizes of one belong to none."""
    pairs: list[tuple[list[int], list[int]]] = []
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

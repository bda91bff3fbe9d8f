"""Operators that move elements: views, transpositions, slices, concatenations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from ..dimension_tracker import DimensionTracker
from ..labels import FIXED, Block, Labels
from .elementwise import labelled

__all__ = [
    "as_strided", "cat", "col2im", "expand", "flip", "glu", "im2col", "pad", "permute", "repeat", "repeat_interleave",
    "select", "slice_", "split", "split_with_sizes", "stack", "transpose", "unbind", "unfold", "unsqueeze", "view",
]  # fmt: skip


def view(tracker: DimensionTracker, out: Tensor, x: Tensor, *_: Any) -> Labels:
    """The same elements in another shape."""
    return tracker.get(x).reshaped(out.shape, tracker)


def permute(tracker: DimensionTracker, out: Tensor, x: Tensor, order: Sequence[int]) -> Labels:
    """Dimensions in another order."""
    labels = tracker.get(x)
    rank = len(labels.shape)
    order = [dim % rank for dim in order]
    return labels.moved(out.shape, [order.index(dim) for dim in range(rank)])


def transpose(tracker: DimensionTracker, out: Tensor, x: Tensor, one: int = 0, other: int = -1) -> Labels:
    """Two dimensions change places."""
    order = list(range(len(x.shape)))
    if len(order) > 1:
        order[one], order[other] = order[other], order[one]
    return permute(tracker, out, x, order)


def unsqueeze(tracker: DimensionTracker, out: Tensor, x: Tensor, at: int) -> Labels:
    """A dimension of size one comes in."""
    at %= len(out.shape)
    return tracker.get(x).moved(out.shape, [dim + (dim >= at) for dim in range(len(x.shape))])


def expand(tracker: DimensionTracker, out: Tensor, x: Tensor, *_: Any) -> Labels:
    """Dimensions come in front; those of size one are repeated."""
    return tracker.get(x).moved(out.shape, range(len(out.shape) - len(x.shape), len(out.shape)))


def slice_(
    tracker: DimensionTracker, out: Tensor, x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None,
    step: int = 1,
) -> Labels:  # fmt: skip
    """Some of the indices along a dimension."""
    labels = tracker.get(x)
    dim %= len(labels.shape)
    if step != 1 and labels.of(dim) is not None:
        return labelled(out, *tracker.keep_whole(labels, [dim]).blocks)
    return labels.taken(out.shape, dim, slice(start, end, step))


def select(tracker: DimensionTracker, out: Tensor, x: Tensor, dim: int, index: int) -> Labels:
    """One index of a dimension, which is gone then."""
    labels = tracker.get(x)
    return _selected(tracker, labels, dim % len(labels.shape), int(index), out)


def _selected(tracker: DimensionTracker, labels: Labels, dim: int, index: int, out: Tensor) -> Labels:
    """Return the labels at one index; in a block of several dimensions this one stays whole: q, k, v of one width."""
    block, others = labels.of(dim), labels.without(dim)
    rest = [d - (d > dim) if d != dim else None for d in range(len(labels.shape))]
    if block is None or len(block.dims) == 1:
        return replace(others.moved(out.shape, rest), spoilt=None if block is None else block.atoms)
    axis = block.dims.index(dim)
    tracker.join(block.atoms, block.atoms.take([0], axis))
    part = Block(tuple(d for d in block.dims if d != dim), np.asarray(block.atoms.take(index, axis)), block.zero)
    return replace(others, blocks=(*others.blocks, part)).moved(out.shape, rest)


def unbind(tracker: DimensionTracker, out: Sequence[Tensor], x: Tensor, dim: int = 0) -> list[Labels]:
    """Each index of a dimension by itself."""
    labels = tracker.get(x)
    return [_selected(tracker, labels, dim % len(labels.shape), index, part) for index, part in enumerate(out)]


def split(tracker: DimensionTracker, out: Sequence[Tensor], x: Tensor, _: Any, dim: int = 0) -> list[Labels]:
    """Split into parts of one size: they lose alike."""
    labels = tracker.get(x)
    dim %= len(labels.shape)
    if labels.of(dim) is not None and out[-1].shape[dim] != out[0].shape[dim]:
        labels = tracker.keep_whole(labels, [dim])
    return _alike(tracker, _parts(labels, dim, out), dim)


def split_with_sizes(tracker: DimensionTracker, out: Sequence[Tensor], x: Tensor, _: Any, dim: int = 0) -> list[Labels]:
    """Split into parts of any sizes."""
    labels = tracker.get(x)
    return _parts(labels, dim % len(labels.shape), out)


def glu(tracker: DimensionTracker, out: Tensor, x: Tensor, dim: int = -1) -> Labels:
    """Multiply one half by a function of the other: they lose alike."""
    dim %= len(out.shape)
    return _alike(tracker, _parts(tracker.get(x), dim, (out, out)), dim)[0]


def _parts(labels: Labels, dim: int, out: Sequence[Tensor]) -> list[Labels]:
    ends = np.cumsum([part.shape[dim] for part in out]).tolist()
    return [
        labels.taken(part.shape, dim, slice(end - part.shape[dim], end)) for part, end in zip(out, ends, strict=True)
    ]


def _alike(tracker: DimensionTracker, parts: list[Labels], dim: int) -> list[Labels]:
    blocks = [part.of(dim) for part in parts]
    for other in blocks[1:]:
        if blocks[0] is not None and other is not None:
            tracker.join(blocks[0].atoms, other.atoms)
    return parts


def cat(tracker: DimensionTracker, out: Tensor, values: Sequence[Tensor], dim: int = 0) -> Labels:
    """Put values one behind the other; along other dimensions they go together."""
    dim %= len(out.shape)
    given = [value for value in values if len(value.shape) == len(out.shape) and value.shape[dim] > 0]
    operands = [tracker.get(value) for value in given]
    joint = {d for labels in operands for block in labels.blocks if len(block.dims) > 1 for d in block.dims}
    if joint and len({frozenset(block.dims for block in labels.blocks) for labels in operands}) > 1:
        whole = [dim] if dim in joint else sorted(joint)
        operands = [tracker.keep_whole(labels, whole) for labels in operands]
    blocks: list[Block | None] = []
    for dims in dict.fromkeys(block.dims for labels in operands for block in labels.blocks):
        parts = [next((block for block in labels.blocks if block.dims == dims), None) for labels in operands]
        blocks.append(_behind(operands, parts, dims, dim) if dim in dims else _beside(tracker, parts))
    return labelled(out, *blocks)


def _behind(operands: Sequence[Labels], parts: Sequence[Block | None], dims: tuple[int, ...], dim: int) -> Block:
    atoms = [
        np.full([labels.shape[d] for d in dims], FIXED, dtype=np.int64) if part is None else part.atoms
        for labels, part in zip(operands, parts, strict=True)
    ]
    is_zero = all(part is None or part.zero for part in parts)
    return Block(dims, np.concatenate(atoms, axis=dims.index(dim)), is_zero)


def _beside(tracker: DimensionTracker, parts: Sequence[Block | None]) -> Block | None:
    joined = tracker.pair(*parts)
    return None if joined is None else replace(joined, zero=all(part is not None and part.zero for part in parts))


def stack(tracker: DimensionTracker, out: Tensor, values: Sequence[Tensor], dim: int = 0) -> Labels:
    """Put values side by side along a new dimension."""
    dim %= len(out.shape)
    operands = [tracker.get(value) for value in values]
    if len({frozenset(block.dims for block in labels.blocks) for labels in operands}) > 1:
        for labels in operands:
            tracker.keep_whole(labels)
        return labelled(out)
    blocks: list[Block] = []
    for block in operands[0].blocks:
        parts = [next(each for each in labels.blocks if each.dims == block.dims) for labels in operands]
        dims = (dim, *(d + (d >= dim) for d in block.dims))
        is_zero = all(part.zero for part in parts)
        made = Block(tuple(range(len(dims))), np.stack([part.atoms for part in parts]), is_zero).at(dims)
        tracker.undecided(made.atoms)
        blocks.append(made)
    return labelled(out, *blocks)


def flip(tracker: DimensionTracker, out: Tensor, x: Tensor, dims: Sequence[int]) -> Labels:
    """Indices in the opposite order."""
    labels = tracker.get(x)
    for dim in dims:
        labels = labels.taken(out.shape, dim % len(out.shape), slice(None, None, -1))
    return labels


def repeat(tracker: DimensionTracker, out: Tensor, x: Tensor, times: Sequence[int]) -> Labels:
    """All indices several times over."""
    labels = expand(tracker, out, x)
    tiled = (replace(each, atoms=np.tile(each.atoms, [times[dim] for dim in each.dims])) for each in labels.blocks)
    return replace(labels, blocks=tuple(tiled))


def repeat_interleave(tracker: DimensionTracker, out: Tensor, x: Tensor, times: Any = None, dim: Any = None) -> Labels:
    """Each index several times."""
    labels = tracker.get(x)
    if not isinstance(times, int) or dim is None:
        tracker.keep_whole(labels)
        return labelled(out)
    indices = np.arange(labels.shape[int(dim)], dtype=np.int64).repeat(int(times))
    return labels.taken(out.shape, dim % len(out.shape), indices)


def pad(tracker: DimensionTracker, out: Tensor, x: Tensor, pads: Sequence[int], value: float = 0) -> Labels:
    """Put constants around a value; indices that are added stay."""
    labels = tracker.get(x)
    last = len(labels.shape) - 1
    grown = [last - number for number in range(len(pads) // 2) if pads[2 * number] or pads[2 * number + 1]]
    labels = labelled(out, *tracker.keep_whole(labels, grown).blocks)
    return labels.with_zero(False) if value else labels


def as_strided(tracker: DimensionTracker, out: Tensor, x: Tensor, *_: Any) -> Labels:
    """Follow what only gives dimensions of size one other strides, as a global pooling does of its result."""
    labels = tracker.get(x)
    if labels.shape == tuple(out.shape) and out.shape[2:].numel() == 1 and out.stride()[:2] == (out.shape[1], 1):
        return labels
    tracker.keep_whole(labels)
    return labelled(out)


def im2col(tracker: DimensionTracker, out: Tensor, x: Tensor, *_: Any) -> Labels:
    """Put the places of a window beside each other in each channel; rows and columns stay whole."""
    rank = len(x.shape)
    labels = tracker.keep_whole(tracker.get(x), [rank - 2, rank - 1])
    places = out.shape[-2] // x.shape[rank - 3]
    indices = np.arange(x.shape[rank - 3], dtype=np.int64).repeat(places)
    grown = (*x.shape[: rank - 3], out.shape[-2], *x.shape[rank - 2 :])
    taken = labels.taken(grown, rank - 3, indices)
    return taken.moved(out.shape, [*range(rank - 2), None, None])


def col2im(tracker: DimensionTracker, out: Tensor, x: Tensor, *_: Any) -> Labels:
    """Sum windows to an image; all places of a window in a channel go together."""
    rank = len(x.shape)
    labels = tracker.keep_whole(tracker.get(x), [rank - 1])
    line = labels.line(rank - 2, tracker)
    others = list(labels.without(rank - 2).blocks)
    if line is not None:
        joined = tracker.join_along(line.atoms.reshape(out.shape[rank - 2], -1), 1)
        others.append(Block((rank - 2,), joined, line.zero))
    return labelled(out, *others)


def unfold(tracker: DimensionTracker, out: Tensor, x: Tensor, dim: int, *_: Any) -> Labels:
    """Put windows along a dimension, which stays whole, into a new one behind all."""
    return labelled(out, *tracker.keep_whole(tracker.get(x), [dim % len(x.shape)]).blocks)

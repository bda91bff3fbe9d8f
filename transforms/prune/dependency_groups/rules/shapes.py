"""Operators that move elements: views, transpositions, slices, concatenations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from ..dimension_tracker import DimensionTracker
from ..index_classes import FIXED, Array
from ..labels import Block, Labels
from .elementwise import results_of

__all__ = ["SHAPES"]


def _argument(args: Sequence[Any], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _view(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    return tracker.get(args[0]).reshaped(out.shape, tracker.atoms, tracker.why)


def _permuted(labels: Labels, order: Sequence[int]) -> Labels:
    rank = len(labels.shape)
    order = [dim % rank for dim in order]
    return labels.moved([labels.shape[dim] for dim in order], [order.index(dim) for dim in range(rank)])


def _permute(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    return _permuted(tracker.get(args[0]), args[1])


def _transpose(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    labels = tracker.get(args[0])
    order = list(range(len(labels.shape)))
    first, second = args[1:3] if len(args) > 2 else (0, -1)
    if len(order) > 1:
        order[first], order[second] = order[second], order[first]
    return _permuted(labels, order)


def _unsqueeze(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    labels = tracker.get(args[0])
    at = args[1] % len(out.shape)
    return labels.moved(out.shape, [dim + (dim >= at) for dim in range(len(labels.shape))])


def _expand(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    labels = tracker.get(args[0])
    shift = len(out.shape) - len(labels.shape)
    return labels.moved(out.shape, [dim + shift for dim in range(len(labels.shape))])


def _slice(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:
    labels = tracker.get(args[0])
    dim = _argument(args, kwargs, 1, "dim", 0) % len(labels.shape)
    start, end = _argument(args, kwargs, 2, "start", None), _argument(args, kwargs, 3, "end", None)
    step = _argument(args, kwargs, 4, "step", 1)
    if step != 1 and labels.of(dim) is not None:
        return Labels(tuple(out.shape), tracker.keep_whole(labels, [dim]).blocks)
    return labels.taken(out.shape, dim, slice(start, end, step))


def _select(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    labels = tracker.get(args[0])
    return _selected(tracker, labels, args[1] % len(labels.shape), int(args[2]), out)


def _selected(tracker: DimensionTracker, labels: Labels, dim: int, index: int, out: Tensor) -> Labels:
    """Return the labels at one index; in a block of several dimensions this one stays whole: q, k, v of one width."""
    block = labels.of(dim)
    rest = [d - (d > dim) if d != dim else None for d in range(len(labels.shape))]
    if block is None:
        return labels.moved(out.shape, rest)
    if len(block.dims) == 1:
        others = tuple(each for each in labels.blocks if each is not block)
        return replace(Labels(labels.shape, others).moved(out.shape, rest), spoilt=block.atoms)
    axis = block.dims.index(dim)
    part = Block(tuple(d for d in block.dims if d != dim), np.asarray(block.atoms.take(index, axis)), block.zero)
    tracker.atoms.join(block.atoms, block.atoms.take([0], axis), tracker.why)
    others = tuple(each for each in labels.blocks if each is not block)
    return Labels(labels.shape, (*others, part)).moved(out.shape, rest)


def _unbind(
    tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Sequence[Tensor]
) -> list[Labels]:
    labels = tracker.get(args[0])
    dim = _argument(args, kwargs, 1, "dim", 0) % len(labels.shape)
    return [_selected(tracker, labels, dim, index, part) for index, part in enumerate(out)]


def _split(
    tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Sequence[Tensor]
) -> list[Labels]:
    """Split into parts of one size: they lose alike."""
    labels = tracker.get(args[0])
    dim = _argument(args, kwargs, 2, "dim", 0) % len(labels.shape)
    if labels.of(dim) is not None and out[-1].shape[dim] != out[0].shape[dim]:
        labels = tracker.keep_whole(labels, [dim])
    parts = _parts(labels, dim, out)
    for part in parts[1:]:
        first, other = parts[0].of(dim), part.of(dim)
        if first is not None and other is not None:
            tracker.atoms.join(first.atoms, other.atoms, tracker.why)
    return parts


def _split_with_sizes(
    tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Sequence[Tensor]
) -> list[Labels]:
    labels = tracker.get(args[0])
    return _parts(labels, _argument(args, kwargs, 2, "dim", 0) % len(labels.shape), out)


def _parts(labels: Labels, dim: int, out: Sequence[Tensor]) -> list[Labels]:
    parts: list[Labels] = []
    start = 0
    for part in out:
        end = start + part.shape[dim]
        parts.append(labels.taken(part.shape, dim, slice(start, end)))
        start = end
    return parts


def _cat(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:
    """Put values one behind the other; along other dimensions they go together."""
    dim = _argument(args, kwargs, 1, "dim", 0) % len(out.shape)
    values = [value for value in results_of(args[0]) if len(value.shape) == len(out.shape) and value.shape[dim] > 0]
    operands = [tracker.get(value) for value in values]
    joint = {d for labels in operands for block in labels.blocks if len(block.dims) > 1 for d in block.dims}
    if joint and not _same_blocks(operands, dim):
        whole = [dim] if dim in joint else sorted(joint)
        operands = [tracker.keep_whole(labels, whole) for labels in operands]
    blocks: list[Block] = []
    for dims in dict.fromkeys(block.dims for labels in operands for block in labels.blocks):
        block = _behind(operands, dims, dim) if dim in dims else _beside(tracker, operands, dims)
        blocks += [] if block is None else [block]
    return Labels(tuple(out.shape), tuple(blocks))


def _same_blocks(operands: Sequence[Labels], dim: int) -> bool:
    """Say whether all have blocks over the same dimensions, so that these can be put behind each other as they are."""
    kinds = {tuple(sorted(block.dims for block in labels.blocks if dim in block.dims)) for labels in operands}
    rest = {tuple(sorted(block.dims for block in labels.blocks if dim not in block.dims)) for labels in operands}
    return len(kinds) == 1 and len(rest) == 1


def _behind(operands: Sequence[Labels], dims: tuple[int, ...], dim: int) -> Block | None:
    parts: list[Any] = []
    zero = True
    for labels in operands:
        block = next((block for block in labels.blocks if block.dims == dims), None)
        shape = [labels.shape[d] for d in dims]
        parts.append(np.full(shape, FIXED, dtype=np.int64) if block is None else block.atoms)
        zero = zero and (block is None or block.zero)
    return Block(dims, np.concatenate(parts, axis=dims.index(dim)), zero)


def _beside(tracker: DimensionTracker, operands: Sequence[Labels], dims: tuple[int, ...]) -> Block | None:
    found = [next((block for block in labels.blocks if block.dims == dims), None) for labels in operands]
    given = [block for block in found if block is not None]
    if len(given) < len(found):
        for block in given:
            tracker.atoms.fix(block.atoms, tracker.why)
        return None
    for block in given[1:]:
        tracker.atoms.join(given[0].atoms, block.atoms, tracker.why)
    return Block(dims, given[0].atoms, all(block.zero for block in given))


def _stack(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:
    dim = _argument(args, kwargs, 1, "dim", 0) % len(out.shape)
    operands = [tracker.get(value) for value in args[0]]
    if len({tuple(sorted(block.dims for block in labels.blocks)) for labels in operands}) > 1:
        operands = [tracker.keep_whole(labels) for labels in operands]
        return Labels(tuple(out.shape))
    blocks: list[Block] = []
    for block in operands[0].blocks:
        parts = [next(each for each in labels.blocks if each.dims == block.dims) for labels in operands]
        atoms = np.stack([part.atoms for part in parts])
        dims = (dim, *(d + (d >= dim) for d in block.dims))
        made = Block(tuple(range(len(dims))), atoms, all(part.zero for part in parts)).at(dims)
        tracker.atoms.undecided(made.atoms)
        blocks.append(made)
    return Labels(tuple(out.shape), tuple(blocks))


def _flip(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    labels = tracker.get(args[0])
    for dim in args[1]:
        labels = labels.taken(out.shape, dim % len(out.shape), slice(None, None, -1))
    return labels


def _repeat(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:
    labels = _expand(tracker, args, kwargs, out)
    times = args[1]
    blocks = [
        Block(block.dims, np.tile(block.atoms, [times[dim] for dim in block.dims]), block.zero)
        for block in labels.blocks
    ]
    return Labels(labels.shape, tuple(blocks))


def _repeat_interleave(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:
    labels = tracker.get(args[0])
    dim = _argument(args, kwargs, 2, "dim", None)
    if not isinstance(args[1], int) or dim is None:
        tracker.keep_whole(labels)
        return Labels(tuple(out.shape))
    indices: Array = np.arange(labels.shape[int(dim)], dtype=np.int64).repeat(int(args[1]))
    return labels.taken(out.shape, dim % len(out.shape), indices)


def _glu(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:
    """Multiply one half by a function of the other: they lose alike."""
    labels = tracker.get(args[0])
    dim = _argument(args, kwargs, 1, "dim", -1) % len(out.shape)
    first, second = _parts(labels, dim, (out, out))
    a, b = first.of(dim), second.of(dim)
    if a is not None and b is not None:
        tracker.atoms.join(a.atoms, b.atoms, tracker.why)
    return first


def _as_strided(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    """Follow what only gives dimensions of size one other strides, as a global pooling does of its result."""
    labels = tracker.get(args[0])
    if labels.shape == tuple(out.shape) and out.shape[2:].numel() == 1 and out.stride()[:2] == (out.shape[1], 1):
        return labels
    tracker.keep_whole(labels)
    return Labels(tuple(out.shape))


def _last_two(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    labels = tracker.get(args[0])
    rank = len(labels.shape)
    return tracker.keep_whole(labels, [rank - 2, rank - 1])


SHAPES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys("view _unsafe_view reshape flatten squeeze squeeze_ _reshape_alias unflatten".split(), _view),
    **dict.fromkeys("t transpose numpy_T swapaxes".split(), _transpose),
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    **dict.fromkeys(("expand", "broadcast_to", "expand_as"), _expand),
    "slice": _slice,
    "select": _select,
    "unbind": _unbind,
    **dict.fromkeys("split unsafe_split chunk unsafe_chunk tensor_split".split(), _split),
    **dict.fromkeys("split_with_sizes unsafe_split_with_sizes split_with_sizes_copy".split(), _split_with_sizes),
    **dict.fromkeys("cat concat".split(), _cat),
    "stack": _stack,
    "flip": _flip,
    "as_strided": _as_strided,
    "glu": _glu,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    **dict.fromkeys(("tril", "triu"), _last_two),
}

"""Operators that work element by element, and those that look up or scatter by index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from ..dimension_tracker import DimensionTracker
from ..labels import Block, Labels

__all__ = [
    "Rule", "add_index", "clamp", "clamp_max", "elementwise", "embedding", "first", "gather", "index", "index_put",
    "labelled", "masked_fill", "merged", "never", "results_of",
]  # fmt: skip

Rule: TypeAlias = "Callable[..., Any]"
"""A function of the tracker, an operator's result and its arguments by position, which gives the result's labels."""

_Zero: TypeAlias = "Callable[[Sequence[bool | None]], bool]"
"""Whether a result is zero, by whether its operands are; None stands for one that stays whole."""


def results_of(out: Any) -> Sequence[Any]:
    """Return what an operator gives as a sequence."""
    return cast("Sequence[Any]", out) if isinstance(out, (tuple, list)) else (out,)


def labelled(out: Tensor, *blocks: Block | None) -> Labels:
    """Return the labels of a result."""
    return Labels(tuple(out.shape), tuple(block for block in blocks if block is not None))


def merged(tracker: DimensionTracker, operands: Sequence[Labels], shape: Sequence[int], zero: _Zero) -> Labels:
    """Return the labels of what operands give element by element; what meets must go together."""
    shifted = [_shifted(labels, len(shape)) for labels in operands]
    found = [_merged(tracker, shifted, dims, zero) for dims in _overlapping(shifted)]
    return Labels(tuple(shape), tuple(block for block in found if block is not None))


def _shifted(labels: Labels, rank: int) -> Labels:
    shift = rank - len(labels.shape)
    return labels.moved((1,) * shift + labels.shape, range(shift, rank)) if shift else labels


def _overlapping(operands: Sequence[Labels]) -> list[tuple[int, ...]]:
    """Return the sets of dimensions that blocks connect."""
    found: list[set[int]] = []
    for block in (block for labels in operands for block in labels.blocks):
        touching = [dims for dims in found if dims & set(block.dims)]
        found = [dims for dims in found if dims not in touching] + [set(block.dims).union(*touching)]
    return [tuple(sorted(dims)) for dims in found]


def _merged(tracker: DimensionTracker, operands: Sequence[Labels], dims: tuple[int, ...], zero: _Zero) -> Block | None:
    """Return the block of a result over dimensions that blocks of the operands connect."""
    present = [labels for labels in operands if any(labels.shape[dim] > 1 for dim in dims)]
    blocks = [labels.of(dims[0]) for labels in operands]
    if not all(block is not None and block.dims == dims for block in (labels.of(dims[0]) for labels in present)):
        cut = _cut(present, dims)
        for labels in present:
            tracker.keep_whole(labels, [dim for dim in dims if dim != cut])
        if cut is None:
            return None
        has_heads = any(block is not None and len(block.dims) > 1 for block in blocks)
        blocks, dims = [labels.line(cut, tracker) for labels in operands], (cut,)
        tracker.heads += [block.atoms for block in blocks if has_heads and block is not None]
    given = [block.atoms for block in blocks if block is not None]
    for other in given[1:]:
        tracker.join(given[0], other)
    return Block(dims, given[0], zero([None if block is None else block.zero for block in blocks]))


def _cut(operands: Sequence[Labels], dims: tuple[int, ...]) -> int | None:
    """Return the one of the dimensions that may be cut: none of the operands has it whole."""
    able = [dim for dim in dims if all(labels.shape[dim] == 1 or labels.of(dim) is not None for labels in operands)]
    everywhere = [dim for dim in able if all(labels.of(dim) is not None for labels in operands)]
    return next(iter(everywhere or able), None)


def first(flags: Sequence[bool | None]) -> bool:
    """Say whether the first operand is zero."""
    return bool(flags[0])


def never(_: Sequence[bool | None]) -> bool:
    """Say that the result is never known to be zero."""
    return False


def elementwise(zero: _Zero, *, scalars: int = 0) -> Rule:
    """Return the rule of an operator that is zero where `zero` says so of its operands.
    Plain numbers are operands among the first `scalars` arguments alone.
    """

    def rule(tracker: DimensionTracker, out: Any, *args: Any) -> Any:
        results = results_of(out)
        operands = [tracker.get(value) for value in args if isinstance(value, Tensor)]
        operands += [Labels(()) for value in args[:scalars] if not isinstance(value, Tensor) and value != 0]
        return [merged(tracker, operands, results[0].shape, zero)] * len(results)

    return rule


def clamp(tracker: DimensionTracker, out: Tensor, x: Tensor, low: Any = None, high: Any = None) -> Labels:
    """Clamping keeps a zero that is within the limits."""
    tensors = [value for value in (x, low, high) if isinstance(value, Tensor)]
    keeps = len(tensors) == 1 and (low is None or low <= 0) and (high is None or high >= 0)
    return merged(tracker, [tracker.get(value) for value in tensors], out.shape, first if keeps else never)


def clamp_max(tracker: DimensionTracker, out: Tensor, x: Tensor, high: Any) -> Labels:
    """Clamp from above alone."""
    return clamp(tracker, out, x, None, high)


def masked_fill(tracker: DimensionTracker, out: Tensor, x: Tensor, mask: Tensor, filled: Any) -> Labels:
    """Filling with zeros keeps a zero."""
    keeps = not isinstance(filled, Tensor) and filled == 0
    return merged(tracker, [tracker.get(x), tracker.get(mask)], out.shape, first if keeps else never)


def embedding(tracker: DimensionTracker, out: Tensor, table: Tensor, *_: Any) -> Labels:
    """Look rows up: their width is that of the result."""
    rows, width = tracker.get(table).of(0), tracker.get(table).of(1)
    if rows is not None:
        tracker.reads(rows)
        tracker.fix(rows.atoms)
    tracker.makes(width)
    return labelled(out, None if width is None else Block((len(out.shape) - 1,), width.atoms))


def index(tracker: DimensionTracker, out: Tensor, x: Tensor, indices: Sequence[Tensor | None]) -> Labels:
    """Index by tensors: what they index stays whole, the dimensions behind move."""
    labels = tracker.get(x)
    positions = [dim for dim, each in enumerate(indices) if each is not None]
    masks = [each.dim() for each in indices if each is not None and each.dtype is torch.bool]
    if max(masks, default=1) > 1 or (positions and positions != list(range(positions[0], positions[-1] + 1))):
        tracker.keep_whole(labels)
        return labelled(out)
    labels = tracker.keep_whole(labels, positions)
    ahead = positions[0] if positions else 0
    grown = len(out.shape) - len(labels.shape)
    names = [dim if dim < ahead else dim + grown for dim in range(len(labels.shape))]
    return labels.moved(out.shape, [None if dim in positions else name for dim, name in enumerate(names)])


def gather(tracker: DimensionTracker, out: Tensor, x: Tensor, dim: int, where: Tensor, *_: Any) -> Labels:
    """Look up along one dimension, with an index of the result's shape."""
    labels = [tracker.keep_whole(tracker.get(each), [dim % len(out.shape)]) for each in (x, where)]
    return merged(tracker, [labelled(out, *each.blocks) for each in labels], out.shape, first)


def add_index(
    tracker: DimensionTracker, out: Tensor, into: Tensor, dim: int, _: Tensor, source: Any, *__: Any
) -> Labels:
    """Write or add by index along one dimension; the others go together."""
    dim %= len(out.shape)
    labels = tracker.keep_whole(tracker.get(into), [dim])
    if not isinstance(source, Tensor):
        return tracker.keep_whole(labels)
    given = tracker.keep_whole(tracker.get(source), [dim])
    return merged(tracker, [labels, labelled(out, *given.blocks)], out.shape, all)


def index_put(
    tracker: DimensionTracker, out: Tensor, into: Tensor, indices: Sequence[Tensor | None], values: Tensor, *_: Any
) -> Labels:
    """Write by index: where that is one list of rows, the other dimensions go together."""
    written = tracker.get(values)
    positions = [dim for dim, each in enumerate(indices) if each is not None]
    labels = tracker.keep_whole(tracker.get(into), positions)
    if positions == [0] and indices[0] is not None and indices[0].dim() == 1:
        return merged(tracker, [labels, written], out.shape, all)
    tracker.keep_whole(written)
    return tracker.keep_whole(labels)

"""Operators that multiply and sum: matrix products, attention, convolutions; and what moves channels into space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from ..dimension_tracker import DimensionTracker
from ..labels import Block, Labels
from .elementwise import Rule, labelled, merged, results_of

__all__ = [
    "BMM", "MM", "MV", "added", "attention", "channel_shuffle", "convolution", "grouped_mm", "in_channels",
    "linear", "pixel_shuffle", "pixel_unshuffle", "product",
]  # fmt: skip


def _contracted(
    tracker: DimensionTracker, sides: tuple[Labels, Labels], summed: tuple[int, int],
    outs: tuple[Mapping[int, int], Mapping[int, int]], shape: Sequence[int], batch: Sequence[int] = (),
) -> Labels:  # fmt: skip
    """Return the labels of a sum of products; `outs` says which dimension of the result each other of a side is."""
    left, right = _summed(tracker, sides, summed)
    blocks: list[Block] = []
    for dim in batch:
        tracker.heads += [block.atoms for block in (left.of(dim), right.of(dim)) if block and len(block.dims) > 1]
        a, b = left.line(dim, tracker), right.line(dim, tracker)
        if tracker.pair(a, b) is not None and a is not None and b is not None:
            blocks.append(Block((dim,), a.atoms, a.zero or b.zero))
        left, right = left.without(dim), right.without(dim)
    for side, names in zip((left, right), outs, strict=True):
        for block in side.blocks:
            if all(dim in names for dim in block.dims):
                tracker.makes(block)
                blocks.append(block.at([names[dim] for dim in block.dims]))
    return Labels(tuple(shape), tuple(blocks))


def _summed(tracker: DimensionTracker, sides: tuple[Labels, Labels], summed: tuple[int, int]) -> tuple[Labels, Labels]:
    """Join what is summed over: index by index where both may be cut, whole where one may not."""
    (left, right), (i, j) = sides, summed
    a, b = left.of(i), right.of(j)
    if a is not None and b is not None and len(a.dims) == len(b.dims) == 1 and (a.zero or b.zero):
        tracker.reads(b)
        tracker.reads(a)
        tracker.join(a.atoms, b.atoms)
        return left, right
    for block in (a, b):
        if block is not None and len(block.dims) > 1:
            tracker.heads.append(block.atoms)
        else:
            tracker.reads(block)
    return tracker.keep_whole(left, [i]), tracker.keep_whole(right, [j])


def product(summed: tuple[int, int], *outs: Mapping[int, int], batch: Sequence[int] = ()) -> Rule:
    """Return the rule of products of matrices and vectors; see `_contracted`."""
    left, right = outs

    def rule(tracker: DimensionTracker, out: Tensor, x: Tensor, y: Tensor, *_: Any) -> Labels:
        return _contracted(tracker, (tracker.get(x), tracker.get(y)), summed, (left, right), out.shape, batch)

    return rule


MM = product((1, 0), {0: 0}, {1: 1})
BMM = product((2, 1), {1: 1}, {2: 2}, batch=(0,))
MV = product((1, 0), {0: 0}, {})


def grouped_mm(
    tracker: DimensionTracker, out: Tensor, x: Tensor, y: Tensor, _: Any = None, bias: Any = None, *__: Any
) -> Labels:
    """Multiply runs of rows each by a matrix of its own, which are stacked: experts."""
    left, right = tracker.get(x), tracker.get(y)
    if len(left.shape) != 2 or len(right.shape) != 3 or bias is not None:
        tracker.keep_whole(left)
        tracker.keep_whole(right)
        return labelled(out)
    right = tracker.keep_whole(right, [0])
    return _contracted(tracker, (left, right), (1, 1), ({0: 0}, {2: 1}), out.shape)


def added(rule: Rule) -> Rule:
    """Return the rule of a product that is added to the first argument."""

    def with_bias(tracker: DimensionTracker, out: Tensor, bias: Tensor, *factors: Tensor) -> Labels:
        return merged(tracker, [rule(tracker, out, *factors), tracker.get(bias)], out.shape, all)

    return with_bias


def linear(tracker: DimensionTracker, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Labels:
    """Rows times a weight, and a bias."""
    left, last = tracker.get(x), len(x.shape) - 1
    names = {dim: dim for dim in range(last)}
    product = _contracted(tracker, (left, tracker.get(weight)), (last, 1), (names, {0: last}), out.shape)
    return product if bias is None else merged(tracker, [product, tracker.get(bias)], out.shape, all)


def attention(
    tracker: DimensionTracker, out: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *_: Any
) -> Any:
    """Attention over [batch, heads, length, width]: heads of a query go with those of its key and value."""
    mask = tracker.named.get("attn_mask", mask)
    queries, keys = (tracker.keep_whole(tracker.get(each), [0, 2, 3]).of(1) for each in (query, key))
    if isinstance(mask, Tensor):
        _masking(tracker, mask, queries)
    read = tracker.get(value)
    wide = read.of(3)
    wide = wide if wide is not None and len(wide.dims) == 1 else None
    values = tracker.keep_whole(read, [0, 2, 3] if wide is None else [0, 2]).of(1)
    return [labelled(results_of(out)[0], _attending(tracker, queries, keys, values), wide)]


def _masking(tracker: DimensionTracker, mask: Tensor, query: Block | None) -> None:
    """Join the heads of a mask that has one for each with those of the query; all else of it stays whole."""
    head = mask.dim() - 3
    labels = tracker.keep_whole(tracker.get(mask), [dim for dim in range(mask.dim()) if dim != head])
    if head >= 0 and mask.shape[head] > 1:
        tracker.pair(query, labels.line(head, tracker))


def _attending(tracker: DimensionTracker, query: Block | None, key: Block | None, value: Block | None) -> Block | None:
    """Join the heads of an attention; several of a query may share one of the key and value."""
    if query is None or key is None or value is None:
        return tracker.pair(query, key, value)
    tracker.join(key.atoms, value.atoms)
    tracker.join(query.atoms, key.atoms.repeat(query.atoms.size // key.atoms.size))
    tracker.heads.append(query.atoms)
    return Block((1,), query.atoms, value.zero)


# -- convolutions -----------------------------------------------------------------------------------------------------


def convolution(
    tracker: DimensionTracker, out: Tensor, x: Tensor, kernel: Tensor, bias: Tensor | None, *args: Any
) -> Labels:
    """Convolutions: plain, grouped, depthwise, transposed."""
    is_transposed, groups = args[3], int(args[5])
    labels, rank = tracker.get(x), len(kernel.shape)
    channel = len(labels.shape) - (rank - 1)
    labels = tracker.keep_whole(labels, range(channel + 1, len(labels.shape)))
    weight = tracker.keep_whole(tracker.get(kernel), range(2, rank))
    line = labels.line(channel, tracker)
    rows, columns = weight.of(int(is_transposed)), weight.of(1 - int(is_transposed))
    tracker.makes(rows)
    tracker.reads(columns)
    if groups == 1:
        tracker.pair(line, columns)
    elif line is not None and line.atoms.size == groups:
        rows = _depthwise(tracker, line, rows, columns, groups, is_transposed=is_transposed)
    else:
        rows = _grouped(tracker, line, rows, columns, groups, is_transposed=is_transposed)
    made = labelled(out, *labels.without(channel).blocks, None if rows is None else Block((channel,), rows.atoms))
    return made if bias is None else merged(tracker, [made, in_channels(tracker, bias, made, channel)], out.shape, all)


def in_channels(tracker: DimensionTracker, tensor: Tensor, like: Labels, channel: int = 1) -> Labels:
    """Return the labels of a tensor with an element for each channel, in the rank of what it is applied to."""
    shape = [size if dim == channel else 1 for dim, size in enumerate(like.shape)]
    return tracker.get(tensor).moved(shape, [channel])


def _grouped(
    tracker: DimensionTracker, line: Block | None, outputs: Block | None, inputs: Block | None, groups: int, *,
    is_transposed: bool,
) -> Block | None:  # fmt: skip
    """Return the channels of a result: all groups stay, and lose the same k-th inputs and the same j-th outputs."""
    if line is None or inputs is None:
        tracker.pair(line, inputs)
    else:
        block = line.atoms.reshape(groups, -1)
        tracker.join(block, block[:1])
        tracker.join(line.atoms if is_transposed else block[0], inputs.atoms)
    if outputs is None:
        return None
    if is_transposed:
        return replace(outputs, atoms=np.tile(outputs.atoms, groups))
    block = outputs.atoms.reshape(groups, -1)
    tracker.join(block, block[:1])
    return outputs


def _depthwise(
    tracker: DimensionTracker, line: Block, outputs: Block | None, inputs: Block | None, groups: int, *,
    is_transposed: bool,
) -> Block | None:  # fmt: skip
    """Return the channels of a result: each goes with the outputs of it alone, and the number of groups follows."""
    tracker.require(tracker.given or groups, line, line.dims[0])
    if is_transposed:
        tracker.pair(line, inputs)
        if outputs is not None:
            tracker.fix(outputs.atoms)
        return replace(line, atoms=line.atoms.repeat(1 if outputs is None else outputs.atoms.size))
    if outputs is None:
        tracker.fix(line.atoms)
        return None
    tracker.join(outputs.atoms, line.atoms.repeat(outputs.atoms.size // groups))
    return outputs


def _channels(tracker: DimensionTracker, x: Tensor) -> tuple[int, Block | None]:
    """Return the dimension of an image's channels, and their block."""
    channel = len(x.shape) - 3
    return channel, tracker.keep_whole(tracker.get(x), [channel + 1, channel + 2]).line(channel, tracker)


def pixel_shuffle(tracker: DimensionTracker, out: Tensor, x: Tensor, factor: int) -> Labels:
    """Move channels into space: those that become one channel go together."""
    channel, line = _channels(tracker, x)
    if line is None:
        return labelled(out)
    joined = tracker.join_along(line.atoms.reshape(-1, int(factor) ** 2), 1)
    return labelled(out, Block((channel,), joined, line.zero) if joined.size > 1 else None)


def pixel_unshuffle(tracker: DimensionTracker, out: Tensor, x: Tensor, factor: int) -> Labels:
    """Move space into channels: each channel becomes several."""
    channel, line = _channels(tracker, x)
    return labelled(out, line and Block((channel,), line.atoms.repeat(int(factor) ** 2), line.zero))


def channel_shuffle(tracker: DimensionTracker, out: Tensor, x: Tensor, groups: int) -> Labels:
    """Interleave groups of channels: each loses the same ones."""
    line = tracker.get(x).line(1, tracker)
    if line is None:
        return labelled(out)
    block = line.atoms.reshape(int(groups), -1)
    tracker.join(block, block[:1])
    return labelled(out, Block((1,), block.T.ravel(), line.zero))

"""Convolutions: plain, grouped, depthwise, transposed; and what works on the dimensions in space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from ..dimension_tracker import DimensionTracker
from ..labels import Block, Labels
from .elementwise import merged, results_of

__all__ = ["CONVOLUTIONS"]


def _convolution(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    x, weight = tracker.get(args[0]), tracker.get(args[1])
    transposed, groups = args[6], int(args[8])
    rank = len(args[1].shape)
    channel = len(x.shape) - (rank - 1)
    x = tracker.keep_whole(x, range(channel + 1, len(x.shape)))
    weight = tracker.keep_whole(weight, range(2, rank))
    made, read = (1, 0) if transposed else (0, 1)
    line = x.line(channel, tracker.atoms, tracker.why)
    rows, columns = weight.of(made), weight.of(read)
    for block, note in ((rows, tracker.makes), (columns, tracker.reads)):
        if block is not None:
            note(block.atoms)
    if groups == 1:
        tracker.join(line, columns)
        result = rows
    else:
        result = _grouped(tracker, line, rows, columns, groups, transposed=transposed)
    others = [block for block in x.blocks if channel not in block.dims]
    blocks = [*others, *([] if result is None else [Block((channel,), result.atoms)])]
    labels = Labels(tuple(out.shape), tuple(blocks))
    return labels if args[2] is None else _biased(tracker, labels, tracker.get(args[2]), channel)


def _biased(tracker: DimensionTracker, labels: Labels, bias: Labels, channel: int) -> Labels:
    shape = [1] * len(labels.shape)
    shape[channel] = labels.shape[channel]
    moved = Labels(tuple(shape), tuple(block.at([channel]) for block in bias.blocks))
    return merged(tracker, [labels, moved], labels.shape, lambda flags: all(map(bool, flags)))


def _grouped(
    tracker: DimensionTracker,
    line: Block | None,
    outputs: Block | None,
    inputs: Block | None,
    groups: int,
    *,
    transposed: bool,
) -> Block | None:
    """Return the channels of a grouped convolution's result.

    Depthwise: a channel goes with the outputs that are made of it alone, and the number of groups follows. Else all
    groups stay, and lose the same channels: the k-th input of each goes, and the j-th output of each.
    """
    if line is not None and line.atoms.size == groups:
        return _depthwise(tracker, line, outputs, inputs, groups, transposed=transposed)
    _every_group_alike(tracker, line, inputs, groups, shared=not transposed)
    if outputs is None:
        return None
    if transposed:
        return replace(outputs, atoms=np.tile(outputs.atoms, groups))
    block = outputs.atoms.reshape(groups, -1)
    tracker.atoms.join(block, block[:1], tracker.why)
    return outputs


def _depthwise(
    tracker: DimensionTracker,
    line: Block,
    outputs: Block | None,
    inputs: Block | None,
    groups: int,
    *,
    transposed: bool,
) -> Block | None:
    tracker.require(tracker.groups, line, line.dims[0])
    if transposed:
        tracker.join(line, inputs)
        if outputs is not None:
            tracker.atoms.fix(outputs.atoms, tracker.why)
        return replace(line, atoms=line.atoms.repeat(1 if outputs is None else outputs.atoms.size))
    if outputs is None:
        tracker.atoms.fix(line.atoms, tracker.why)
        return None
    tracker.atoms.join(outputs.atoms, line.atoms.repeat(outputs.atoms.size // groups), tracker.why)
    return outputs


def _every_group_alike(
    tracker: DimensionTracker, line: Block | None, inputs: Block | None, groups: int, *, shared: bool
) -> None:
    """Let all groups lose the same inputs; `shared` columns of the weight stand for those of every group."""
    if line is None or inputs is None:
        for block in (line, inputs):
            if block is not None:
                tracker.atoms.fix(block.atoms, tracker.why)
        return
    block = line.atoms.reshape(groups, -1)
    tracker.atoms.join(block, block[:1], tracker.why)
    tracker.atoms.join(block[0] if shared else line.atoms, inputs.atoms, tracker.why)


def _in_space(rank: int, *, zero: bool = True) -> Callable[..., Any]:
    """Return the rule of operators that work on the last `rank` dimensions alone."""

    def rule(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:  # noqa: ARG001
        x = tracker.get(args[0])
        first = len(x.shape) - rank
        x = tracker.keep_whole(x, range(first, len(x.shape)))
        results = results_of(out)
        labels = [Labels(tuple(result.shape), x.blocks) for result in results]
        return [each if zero and number == 0 else each.with_zero(False) for number, each in enumerate(labels)]

    return rule


def _pixel_shuffle(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    """Move channels into space: those that become one channel go together."""
    x, factor = tracker.get(args[0]), int(args[1])
    channel = len(x.shape) - 3
    line = tracker.keep_whole(x, [channel + 1, channel + 2]).line(channel, tracker.atoms, tracker.why)
    if line is None:
        return Labels(tuple(out.shape))
    joined = tracker.atoms.join_along(line.atoms.reshape(-1, factor * factor), 1, tracker.why)
    return Labels(tuple(out.shape), (Block((channel,), joined, line.zero),) if joined.size > 1 else ())


def _pixel_unshuffle(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    """Move space into channels: each channel becomes several."""
    x, factor = tracker.get(args[0]), int(args[1])
    channel = len(x.shape) - 3
    line = tracker.keep_whole(x, [channel + 1, channel + 2]).line(channel, tracker.atoms, tracker.why)
    if line is None:
        return Labels(tuple(out.shape))
    return Labels(tuple(out.shape), (Block((channel,), line.atoms.repeat(factor * factor), line.zero),))


def _channel_shuffle(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    """Interleave groups of channels: each loses the same ones."""
    x, groups = tracker.get(args[0]), int(args[1])
    line = x.line(1, tracker.atoms, tracker.why)
    if line is None:
        return Labels(tuple(out.shape))
    block = line.atoms.reshape(groups, -1)
    tracker.atoms.join(block, block[:1], tracker.why)
    return Labels(tuple(out.shape), (Block((1,), block.T.ravel(), line.zero),))


def _pad(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:
    """Put constants around a value; indices that are added stay."""
    labels, pads = tracker.get(args[0]), list(args[1])
    zero = not (args[2] if len(args) > 2 else kwargs.get("value", 0))
    rank = len(labels.shape)
    for number in range(len(pads) // 2):
        dim, (before, after) = rank - 1 - number, pads[2 * number : 2 * number + 2]
        if (before or after) and labels.of(dim) is not None:
            labels = tracker.keep_whole(labels, [dim])
    return (
        Labels(tuple(out.shape), labels.blocks).with_zero(zero) if not zero else Labels(tuple(out.shape), labels.blocks)
    )


def _family(names: str, rank: int, *, zero: bool = True) -> dict[str, Callable[..., Any]]:
    return dict.fromkeys(names.split(), _in_space(rank, zero=zero))


CONVOLUTIONS: dict[str, Callable[..., Any]] = {
    "convolution": _convolution,
    "_convolution": _convolution,
    "convolution_overrideable": _convolution,
    **_family(
        "max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d upsample_nearest1d upsample_linear1d "
        "reflection_pad1d replication_pad1d _upsample_nearest_exact1d max_pool1d_with_indices", 1
    ),
    **_family(
        "max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d "
        "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d reflection_pad2d replication_pad2d "
        "_upsample_nearest_exact2d _upsample_bilinear2d_aa mkldnn_max_pool2d grid_sampler_2d", 2
    ),
    **_family(
        "max_pool3d max_pool3d_with_indices avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d "
        "upsample_nearest3d upsample_trilinear3d reflection_pad3d replication_pad3d _upsample_nearest_exact3d", 3
    ),
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    "channel_shuffle": _channel_shuffle,
    "native_channel_shuffle": _channel_shuffle,
    "constant_pad_nd": _pad,
}  # fmt: skip

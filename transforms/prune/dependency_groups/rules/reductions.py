"""Operators that reduce or normalise over dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..dimension_tracker import DimensionTracker
from ..labels import Block, Labels
from .elementwise import Rule, labelled, merged, results_of
from .products import in_channels

__all__ = ["along", "batch_norm", "group_norm", "in_last", "normalized", "reduction"]


def _dims(rank: int, given: Any) -> list[int]:
    if given is None or given == []:
        return list(range(rank))
    return [int(dim) % rank for dim in results_of(given)] if rank else []


def _without(labels: Labels, dims: Sequence[int], out: Tensor) -> Labels:
    """Return the labels of a result in which dimensions are gone, or of size one."""
    kept = [dim for dim in range(len(labels.shape)) if dim not in dims]
    where: list[int | None] = [None] * len(labels.shape)
    for number, dim in enumerate(kept):
        where[dim] = dim if len(out.shape) == len(labels.shape) else number
    blocks = tuple(block for block in labels.blocks if not set(block.dims) & set(dims))
    return Labels(labels.shape, blocks).moved(out.shape, where)


def reduction(position: int = 0, *, additive: bool = False, observed: str = "", zero: bool = True) -> Rule:
    """Return the rule of a reduction; zeros do not change an `additive` one, and an `observed` one in a known way."""

    def rule(tracker: DimensionTracker, out: Any, x: Tensor, *args: Any) -> Any:
        labels = tracker.get(x)
        given = args[position] if len(args) > position else tracker.named.get("dim")
        dims = [] if isinstance(given, bool) else _dims(len(labels.shape), given)
        for block in labels.blocks:
            inside = [dim for dim in block.dims if dim in dims]
            is_followed = len(inside) == len(block.dims) and block.zero
            if inside and is_followed and observed and len(inside) == 1:
                tracker.observe(observed, block, inside[0])
            elif inside and not (is_followed and additive):
                labels = tracker.keep_whole(labels, inside)
        found = [_without(labels, dims, result) for result in results_of(out)]
        return [each if zero and not number else each.with_zero(False) for number, each in enumerate(found)]

    return rule


def along(position: int = 0, default: int | None = 0, because: str = "", *, zero: bool = False) -> Rule:
    """Return the rule of what works along one dimension, and keeps the others: softmax, sort; `zero`: zeros, too.
    No `default` stands for all dimensions.
    """

    def dims(tracker: DimensionTracker, rank: int, args: Sequence[Any]) -> list[int]:
        given = args[position] if len(args) > position else tracker.named.get("dim", default)
        return _dims(rank, given)

    return _keeping_others(dims, because, zero=zero)


def in_last(count: int) -> Rule:
    """Return the rule of what works on the last dimensions alone: pooling, triangles."""
    return _keeping_others(lambda _, rank, __: list(range(rank - count, rank)), zero=True)


def _keeping_others(
    dims: Callable[[DimensionTracker, int, Sequence[Any]], list[int]], because: str = "", *, zero: bool
) -> Rule:
    """Return the rule of what keeps all dimensions but `dims` as they are; further results are never zero."""

    def rule(tracker: DimensionTracker, out: Any, x: Tensor, *args: Any) -> Any:
        labels = tracker.get(x)
        labels = tracker.keep_whole(labels, dims(tracker, len(labels.shape), args), because)
        found = [labelled(each, *labels.blocks) for each in results_of(out)]
        return [each if zero and not number else each.with_zero(False) for number, each in enumerate(found)]

    return rule


def batch_norm(tracker: DimensionTracker, out: Any, x: Tensor, *args: Any) -> list[Labels]:
    """Normalise each channel by itself; weights and statistics go with it."""
    labels = tracker.get(x)
    columns = [in_channels(tracker, value, labels) for value in args[:4] if isinstance(value, Tensor)]
    is_affine = isinstance(args[0], Tensor)
    return [merged(tracker, [labels, *columns], out[0].shape, lambda flags: is_affine or bool(flags[0]))]


def normalized(kind: str) -> Rule:
    """Return the rule of norms over the last dimensions: of the kept indices alone the statistics are others."""

    def rule(tracker: DimensionTracker, out: Any, x: Tensor, shape: Sequence[int], *given: Any) -> Any:
        labels, rank = tracker.get(x), len(shape)
        dims = range(len(labels.shape) - rank, len(labels.shape))
        for block in labels.blocks:
            inside = [dim for dim in block.dims if dim in dims]
            if inside and len(block.dims) == rank == 1 and block.zero:
                tracker.observe(kind, block, inside[0])
            elif inside:
                labels = tracker.keep_whole(labels, inside)
        weights = [tracker.get(each) for each in given if isinstance(each, Tensor)]
        found = merged(
            tracker, [labels, *weights], results_of(out)[0].shape, lambda flags: len(flags) > 1 and bool(flags[-1])
        )
        for size, dim in zip(tracker.given or (), dims, strict=False):
            tracker.require(size, found.of(dim), dim)
        return [found]

    return rule


def group_norm(tracker: DimensionTracker, out: Any, x: Tensor, weight: Any, bias: Any, *args: Any) -> list[Labels]:
    """Normalise groups of channels: a whole group goes at a time, or, where there is only one, its channels do."""
    labels, groups = tracker.get(x), int(args[3])
    line = labels.line(1, tracker)
    labels = tracker.keep_whole(labels, range(2, len(labels.shape)))
    if line is not None and groups > 1:
        joined = tracker.join_along(line.atoms.reshape(groups, -1), 1)
        tracker.require(tracker.given or groups, Block((0,), joined))
    elif line is not None and line.zero:
        tracker.observe("group", line, 1)
    elif line is not None:
        tracker.keep_whole(labels, [1])
    columns = [in_channels(tracker, value, labels) for value in (weight, bias) if isinstance(value, Tensor)]
    is_affine = isinstance(weight, Tensor)
    return [merged(tracker, [labels, *columns], out[0].shape, lambda _: is_affine)]

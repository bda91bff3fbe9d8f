"""Operators that look up or scatter by index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..dimension_tracker import DimensionTracker
from ..labels import Block, Labels
from .elementwise import merged

__all__ = ["INDEXING"]


def _embedding(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    """Look rows up: their width is that of the result."""
    weight, last = tracker.get(args[0]), len(out.shape) - 1
    rows, width = weight.of(0), weight.of(1)
    if rows is not None:
        tracker.reads(rows.atoms)
        tracker.atoms.fix(rows.atoms, tracker.why)
    if width is None:
        return Labels(tuple(out.shape))
    tracker.makes(width.atoms)
    return Labels(tuple(out.shape), (Block((last,), width.atoms),))


def _index_select(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    labels = tracker.get(args[0])
    dim = args[1] % max(len(labels.shape), 1)
    return Labels(tuple(out.shape), tracker.keep_whole(labels, [dim]).blocks)


def _index(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    """Index by tensors: what they index stays whole, the dimensions behind move."""
    labels, indices = tracker.get(args[0]), args[1]
    positions = [dim for dim, index in enumerate(indices) if index is not None]
    masks = [index.dim() for index in indices if index is not None and index.dtype is torch.bool]
    if max(masks, default=1) > 1 or (positions and positions != list(range(positions[0], positions[-1] + 1))):
        tracker.keep_whole(labels)
        return Labels(tuple(out.shape))
    labels = tracker.keep_whole(labels, positions)
    grown = len(out.shape) - (len(labels.shape) - len(positions))
    first = positions[0] if positions else 0
    names = [
        dim if dim < first else None if dim in positions else dim - len(positions) + grown
        for dim in range(len(labels.shape))
    ]
    return labels.moved(out.shape, names)


def _gather(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    """Look up along one dimension, with an index of the result's shape."""
    dim = args[1] % len(out.shape)
    labels, index = (tracker.keep_whole(tracker.get(each), [dim]) for each in (args[0], args[2]))
    fresh = Labels(tuple(out.shape), labels.blocks)
    return merged(tracker, [fresh, Labels(tuple(out.shape), index.blocks)], out.shape, lambda flags: flags[0] is True)


def _scatter(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    """Write or add by index along one dimension; the others go together."""
    into, dim = tracker.get(args[0]), args[1] % len(out.shape)
    source = args[3]
    into = tracker.keep_whole(into, [dim])
    if not isinstance(source, Tensor):
        return tracker.keep_whole(into)
    given = tracker.keep_whole(tracker.get(source), [dim])
    fresh = Labels(tuple(out.shape), given.blocks)
    return merged(tracker, [into, fresh], out.shape, lambda flags: all(map(bool, flags)))


def _index_add(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:
    return _scatter(tracker, [args[0], args[1], args[2], args[3]], kwargs, out)


def _index_put(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    into, indices, values = tracker.get(args[0]), args[1], tracker.get(args[2])
    positions = [dim for dim, index in enumerate(indices) if index is not None]
    into = tracker.keep_whole(into, positions)
    if positions == [0] and indices[0].dim() == 1:
        return merged(tracker, [into, values], out.shape, lambda flags: all(map(bool, flags)))
    tracker.keep_whole(values)
    return tracker.keep_whole(into)


INDEXING: dict[str, Callable[..., Any]] = {
    "embedding": _embedding,
    "index_select": _index_select,
    "index": _index,
    "_unsafe_index": _index,
    "gather": _gather,
    **dict.fromkeys("scatter_add scatter scatter_reduce".split(), _scatter),
    "index_add": _index_add,
    "index_reduce": _index_add,
    "index_put": _index_put,
    "_index_put_impl": _index_put,
}

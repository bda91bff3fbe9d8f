"""Operators that reduce or normalise over dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..dimension_tracker import DimensionTracker
from ..labels import Block, Labels
from .elementwise import merged, results_of

__all__ = ["REDUCTIONS"]


def _dims(labels: Labels, given: Any) -> list[int]:
    rank = len(labels.shape)
    if given is None or given == []:
        return list(range(rank))
    return [int(dim) % rank for dim in results_of(given)] if rank else []


def _without(labels: Labels, dims: Sequence[int], out: Tensor, *, zero: bool) -> Labels:
    """Return the labels of a result in which dimensions are gone, or of size one."""
    blocks = tuple(block for block in labels.blocks if not set(block.dims) & set(dims))
    kept = [dim for dim in range(len(labels.shape)) if dim not in dims]
    names = {dim: dim if len(out.shape) == len(labels.shape) else kept.index(dim) for dim in kept}
    moved = tuple(block.at([names[dim] for dim in block.dims]) for block in blocks)
    found = Labels(tuple(out.shape), moved)
    return found if zero else found.with_zero(False)


def _rule(position: int = 1, *, additive: bool = False, observed: str = "", zero: bool = True) -> Callable[..., Any]:
    """Return the rule of a reduction.

    Args:
        position: of the dimensions among the arguments.
        additive: zeros do not change the result.
        observed: the kind of a statistic that zeros change in a known way.
        zero: of zeros alone it is zero.
    """

    def rule(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
        labels = tracker.get(args[0])
        given = args[position] if len(args) > position else kwargs.get("dim")
        dims = [] if isinstance(given, bool) else _dims(labels, given)
        labels = _reduced(tracker, labels, dims, additive=additive, observed=observed)
        results = results_of(out)
        return [_without(labels, dims, result, zero=zero and not n) for n, result in enumerate(results)]

    return rule


def _reduced(
    tracker: DimensionTracker, labels: Labels, dims: Sequence[int], *, additive: bool, observed: str
) -> Labels:
    """Return the labels where what may not be cut among the reduced dimensions stays whole."""
    for block in labels.blocks:
        inside = [dim for dim in block.dims if dim in dims]
        if not inside:
            continue
        if len(inside) == len(block.dims) and block.zero and (additive or observed):
            if observed and len(inside) == 1:
                tracker.observe(observed, block, inside[0])
                continue
            if additive:
                continue
        labels = tracker.keep_whole(labels, inside)
    return labels


def _along(
    position: int = 1, *, zero: bool = False, fixed_default: bool = False, because: str = ""
) -> Callable[..., Any]:
    """Return the rule of what keeps its shape and works along one dimension: softmax, cumsum, sort."""

    def rule(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
        labels = tracker.get(args[0])
        given = args[position] if len(args) > position else kwargs.get("dim", -1 if fixed_default else 0)
        labels = labels.whole(_dims(labels, given), tracker.atoms, tracker.why + because)
        results = results_of(out)
        found = [Labels(tuple(each.shape), labels.blocks) for each in results]
        return [each if zero and not n else each.with_zero(False) for n, each in enumerate(found)]

    return rule


def _cumulative(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:  # noqa: ARG001
    labels = tracker.get(args[0])
    return tracker.keep_whole(labels, _dims(labels, args[1]))


def _batch_norm(
    tracker: DimensionTracker,
    args: Sequence[Any],
    kwargs: dict[str, Any],  # noqa: ARG001
    out: Sequence[Tensor],
) -> list[Any]:
    """Normalise each channel by itself; weights and statistics go with it."""
    x = tracker.get(args[0])
    given = [tracker.get(value) for value in args[1:5] if isinstance(value, Tensor)]
    shape = (1, x.shape[1], *(1 for _ in x.shape[2:]))
    columns = [Labels(shape, tuple(block.at([1]) for block in each.blocks)) for each in given]
    affine = isinstance(args[1], Tensor)
    found = merged(tracker, [x, *columns], out[0].shape, lambda flags: affine or flags[0] is True)
    others = tuple(block for block in found.blocks if 1 not in block.dims)
    return [Labels(tuple(out[0].shape), (*others, *(b for b in found.blocks if 1 in b.dims))), *(None for _ in out[1:])]


def _layer_norm(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:  # noqa: ARG001
    """Normalise over the last dimensions: of the kept indices alone the statistics are others."""
    return _normalized(tracker, args[0], len(args[1]), args[2:4], out, "layer")


def _rms_norm(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:  # noqa: ARG001
    return _normalized(tracker, args[0], len(args[1]), args[2:3], out, "rms")


def _normalized(tracker: DimensionTracker, value: Tensor, rank: int, given: Sequence[Any], out: Any, kind: str) -> Any:
    x = tracker.get(value)
    first = len(x.shape) - rank
    dims = list(range(first, len(x.shape)))
    for block in x.blocks:
        inside = [dim for dim in block.dims if dim in dims]
        if not inside:
            continue
        if len(block.dims) > 1 or rank > 1 or not block.zero:
            x = tracker.keep_whole(x, inside)
        else:
            tracker.observe(kind, block, inside[0])
    weights = [tracker.get(each) for each in given if isinstance(each, Tensor)]
    results = results_of(out)
    flags = bool(weights)
    found = merged(tracker, [x, *weights], results[0].shape, lambda zeros: flags and len(zeros) > 1 and bool(zeros[-1]))
    _require_normalized(tracker, found, dims)
    return [found]


def _require_normalized(tracker: DimensionTracker, labels: Labels, dims: Sequence[int]) -> None:
    for size, dim in zip(tracker.normalized or (), dims, strict=False):
        tracker.require(size, labels.of(dim), dim)


def _group_norm(
    tracker: DimensionTracker,
    args: Sequence[Any],
    kwargs: dict[str, Any],  # noqa: ARG001
    out: Sequence[Tensor],
) -> list[Any]:
    """Normalise groups of channels: a whole group goes at a time, or, where there is only one, its channels do."""
    x, groups = tracker.get(args[0]), int(args[6])
    line = x.line(1, tracker.atoms, tracker.why)
    x = tracker.keep_whole(x, range(2, len(x.shape)))
    if line is not None and groups == 1 and line.zero:
        tracker.observe("group", line, 1)
    elif line is not None and groups == 1:
        tracker.keep_whole(x, [1])
    elif line is not None:
        joined = tracker.atoms.join_along(line.atoms.reshape(groups, -1), 1, tracker.why)
        tracker.require(tracker.groups, Block((0,), joined), 0)
    given = [tracker.get(value) for value in args[1:3] if isinstance(value, Tensor)]
    shape = (1, x.shape[1], *(1 for _ in x.shape[2:]))
    columns = [Labels(shape, tuple(block.at([1]) for block in each.blocks)) for each in given]
    affine = isinstance(args[1], Tensor)
    found = merged(tracker, [x, *columns], out[0].shape, lambda flags: affine)
    return [found, *(None for _ in out[1:])]


_COUNTS = ", in which a zero counts, too: such units (classes, say) stay"
_NUMBERS = ", which gives numbers of units, as a router of experts does: these are not followed"

_MOST = "amax amin max min argmax argmin aminmax median mode kthvalue prod any all logsumexp std var std_mean var_mean"

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": _rule(additive=True),
    "nansum": _rule(additive=True),
    "mean": _rule(observed="mean"),
    "linalg_vector_norm": _rule(2, additive=True),
    "norm": _rule(2, additive=True),
    **dict.fromkeys(_MOST.split(), _rule()),
    **dict.fromkeys(("logsumexp", "argmax", "argmin"), _rule(zero=False)),
    **dict.fromkeys("softmax _softmax log_softmax _log_softmax _safe_softmax".split(), _along(because=_COUNTS)),
    **dict.fromkeys("cumsum cumprod logcumsumexp".split(), _cumulative),
    **dict.fromkeys("sort argsort".split(), _along(fixed_default=True, because=_NUMBERS)),
    "topk": _along(2, fixed_default=True, because=_NUMBERS),
    **dict.fromkeys(
        "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit _batch_norm_with_update "
        "_native_batch_norm_legit_no_training _batch_norm_no_update batch_norm".split(),
        _batch_norm,
    ),
    **dict.fromkeys(("native_layer_norm", "layer_norm"), _layer_norm),
    **dict.fromkeys(("rms_norm", "_fused_rms_norm"), _rms_norm),
    "native_group_norm": _group_norm,
}  # fmt: skip

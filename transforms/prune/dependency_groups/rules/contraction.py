"""Operators that multiply and sum: matrix products, convolutions, attention, recurrences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..dimension_tracker import DimensionTracker
from ..labels import Block, Labels
from .elementwise import merged, results_of

__all__ = ["CONTRACTIONS", "contracted"]


def contracted(
    tracker: DimensionTracker, sides: tuple[Labels, Labels], summed: tuple[int, int],
    outs: tuple[Mapping[int, int], ...], batch: Mapping[int, int], shape: Sequence[int],
) -> Labels:  # fmt: skip
    """Return the labels of a sum of products over one dimension of each side.

    Args:
        sides: the operands.
        summed: the dimension of each that is summed.
        outs: for each operand, its own dimension -> that of the result.
        batch: dimension of the result -> the same one of both operands.
        shape: of the result.
    """
    left, right = _summed(tracker, sides, summed)
    blocks: list[Block] = []
    for dim in batch.values():
        left, right, block = _batched(tracker, left, right, dim)
        if block is not None:
            blocks.append(block)
    for side, names in zip((left, right), outs, strict=True):
        for block in side.blocks:
            if all(dim in names for dim in block.dims):
                tracker.makes(block.atoms)
                blocks.append(block.at([names[dim] for dim in block.dims]))
    return Labels(tuple(shape), tuple(blocks))


def _summed(tracker: DimensionTracker, sides: tuple[Labels, Labels], summed: tuple[int, int]) -> tuple[Labels, Labels]:
    """Join what is summed over: index by index where both may be cut, whole where one may not."""
    (left, right), (i, j) = sides, summed
    a, b = left.of(i), right.of(j)
    if a is not None and b is not None and len(a.dims) == len(b.dims) == 1 and (a.zero or b.zero):
        tracker.reads(b.atoms)
        tracker.reads(a.atoms)
        tracker.atoms.join(a.atoms, b.atoms, tracker.why)
        return left, right
    for block in (a, b):
        if block is not None:
            if len(block.dims) == 1:
                tracker.reads(block.atoms)
            else:
                tracker.heads.append(block.atoms)
    return tracker.keep_whole(left, [i]), tracker.keep_whole(right, [j])


def _batched(tracker: DimensionTracker, left: Labels, right: Labels, dim: int) -> tuple[Labels, Labels, Block | None]:
    """Join a dimension that both operands have and the result too; return its block."""
    lines: list[Block | None] = []
    for side in (left, right):
        block = side.of(dim)
        lines.append(side.line(dim, tracker.atoms, tracker.why))
        if block is not None and len(block.dims) > 1:
            tracker.heads.append(block.atoms)
    left, right = (_without(side, dim) for side in (left, right))
    a, b = lines
    if a is None or b is None:
        for line in lines:
            if line is not None:
                tracker.atoms.fix(line.atoms, tracker.why)
        return left, right, None
    tracker.atoms.join(a.atoms, b.atoms, tracker.why)
    return left, right, Block((dim,), a.atoms, a.zero or b.zero)


def _without(labels: Labels, dim: int) -> Labels:
    """Return labels without the block over a dimension."""
    return Labels(labels.shape, tuple(block for block in labels.blocks if dim not in block.dims))


def _mm(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    left, right = tracker.get(args[0]), tracker.get(args[1])
    return contracted(tracker, (left, right), (1, 0), ({0: 0}, {1: 1}), {}, out.shape)


def _bmm(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    left, right = tracker.get(args[0]), tracker.get(args[1])
    return contracted(tracker, (left, right), (2, 1), ({1: 1}, {2: 2}), {0: 0}, out.shape)


def _grouped_mm(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    """Multiply runs of rows each by a matrix of its own, which are stacked: experts."""
    left, right = tracker.get(args[0]), tracker.get(args[1])
    if len(left.shape) != 2 or len(right.shape) != 3 or (len(args) > 3 and args[3] is not None):
        tracker.keep_whole(left)
        tracker.keep_whole(right)
        return Labels(tuple(out.shape))
    right = tracker.keep_whole(right, [0])
    return contracted(tracker, (left, right), (1, 1), ({0: 0}, {2: 1}), {}, out.shape)


def _mv(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    left, right = tracker.get(args[0]), tracker.get(args[1])
    return contracted(tracker, (left, right), (1, 0), ({0: 0}, {}), {}, out.shape)


def _dot(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    return contracted(tracker, (tracker.get(args[0]), tracker.get(args[1])), (0, 0), ({}, {}), {}, out.shape)


def _added(rule: Callable[..., Labels]) -> Callable[..., Labels]:
    def with_bias(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:
        product = rule(tracker, args[1:], kwargs, out)
        return merged(tracker, [product, tracker.get(args[0])], out.shape, lambda flags: all(map(bool, flags)))

    return with_bias


def _linear(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Labels:  # noqa: ARG001
    x, weight = tracker.get(args[0]), tracker.get(args[1])
    last = len(x.shape) - 1
    names = {dim: dim for dim in range(last)}
    product = contracted(tracker, (x, weight), (last, 1), (names, {0: last}), {}, out.shape)
    if len(args) < 3 or args[2] is None:
        return product
    return merged(tracker, [product, tracker.get(args[2])], out.shape, lambda flags: all(map(bool, flags)))


def _attention(tracker: DimensionTracker, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """Attention over [batch, heads, length, width]: heads of a query go with those of its key and value."""
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    query, key = (tracker.keep_whole(tracker.get(each), [0, 2, 3]) for each in args[:2])
    if isinstance(mask, Tensor):
        _masking(tracker, mask, query.of(1))
    value = tracker.get(args[2])
    wide = value.of(3)
    own_width = wide is not None and len(wide.dims) == 1
    value = tracker.keep_whole(value, [0, 2] if own_width else [0, 2, 3])
    heads = _attending(tracker, query.of(1), key.of(1), value.of(1))
    blocks = [block for block in (heads, wide if own_width else None) if block is not None]
    results = results_of(out)
    labels = Labels(tuple(results[0].shape), tuple(blocks))
    return [labels]


def _masking(tracker: DimensionTracker, mask: Tensor, query: Block | None) -> None:
    """Join the heads of a mask that has one for each with those of the query; all else of it stays whole."""
    head = mask.dim() - 3
    labels = tracker.keep_whole(tracker.get(mask), [dim for dim in range(mask.dim()) if dim != head])
    if head >= 0 and mask.shape[head] > 1:
        tracker.join(query, labels.line(head, tracker.atoms, tracker.why))


def _attending(tracker: DimensionTracker, query: Block | None, key: Block | None, value: Block | None) -> Block | None:
    """Join the heads of an attention; several of a query may share one of the key and value."""
    if query is None or key is None or value is None:
        for block in (query, key, value):
            if block is not None:
                tracker.atoms.fix(block.atoms, tracker.why)
        return None
    tracker.atoms.join(key.atoms, value.atoms, tracker.why)
    tracker.atoms.join(query.atoms, key.atoms.repeat(query.atoms.size // key.atoms.size), tracker.why)
    tracker.heads.append(query.atoms)
    return Block((1,), query.atoms, value.zero)


CONTRACTIONS: dict[str, Callable[..., Any]] = {
    "mm": _mm,
    "bmm": _bmm,
    "mv": _mv,
    "_grouped_mm": _grouped_mm,
    "dot": _dot,
    "addmm": _added(_mm),
    "addmv": _added(_mv),
    "baddbmm": _added(_bmm),
    "linear": _linear,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
            "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention scaled_dot_product_attention "
            "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps"
        ).split(),
        _attention,
    ),
}

"""See every function of torch that is called, with the sizes that it is given, and where these come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .dimension_tracker import DimensionTracker
from .labels import Block, Labels
from .rules import WHOLE, results_of
from .sizes import Count, Size, Source

__all__ = ["Functions"]


class Functions(TorchFunctionMode):
    """Give out sizes that know what they count, and note what the sizes that come back are used for."""

    def __init__(self, tracker: DimensionTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        tracker = self._tracker
        name = getattr(func, "__name__", "")
        if tracker.silent:
            return func(*args, **given)
        if name == "__get__":
            return _property(tracker, func, args)
        if name == "size":
            return _size(tracker, args, given)
        if name in WHOLE:
            return _followed_whole(tracker, name, func, args, given)
        before = _BEFORE.get(name)
        if before is not None:
            before(tracker, args, given)
        out = func(*args, **given)
        after = _AFTER.get(name)
        if after is not None:
            tracker.operator = name
            after(tracker, args, given, out)
        elif name not in _FREE:
            _other(tracker, name, args, given)
        return out


def _followed_whole(
    tracker: DimensionTracker, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    tracker.silent = True
    try:
        out = func(*args, **kwargs)
    finally:
        tracker.silent = False
    tracker.operator = name
    WHOLE[name](tracker, args, kwargs, out)
    return out


def _property(tracker: DimensionTracker, func: Any, args: Sequence[Any]) -> Any:
    out = func(*args)
    return _counted(tracker, args[0], out) if isinstance(out, torch.Size) else out


def _size(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    sizes = _counted(tracker, args[0], args[0].shape)
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return sizes if dim is None else cast("Any", sizes)[dim]


def _counted(tracker: DimensionTracker, tensor: Tensor, shape: torch.Size) -> torch.Size:
    if not tracker.knows(tensor):
        return shape
    labels = tracker.look(tensor)
    sizes: list[int] = list(shape)
    for block in labels.blocks:
        for axis, dim in enumerate(block.dims):
            sizes[dim] = Size(sizes[dim], Count(block.atoms, axis))
    return torch.Size(sizes)


def _shape_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], first: int, *names: str) -> list[Any]:
    """Return sizes that are given one by one or as a sequence."""
    given = next((kwargs[name] for name in names if name in kwargs), None)
    if given is None and len(args) > first:
        given = args[first]
        if isinstance(given, int):
            return list(args[first:])
    if isinstance(given, (tuple, list)):
        return list(cast("Sequence[Any]", given))
    return [] if given is None else [given]


def _viewed(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Require of the sizes of a view that they are those of its result."""
    sizes = _shape_arguments(args, kwargs, 1, "shape", "size", "sizes")
    if len(sizes) == len(out.shape):
        _require_all(tracker, sizes, tracker.get(out), 0)


def _require_all(tracker: DimensionTracker, sizes: Sequence[Any], labels: Labels, first: int) -> None:
    for dim, size in enumerate(sizes, first):
        tracker.require(size, labels.of(dim), dim)


def _expanded(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    """Let what is repeated along a dimension be cut where the size that says how often may be."""
    sizes = _shape_arguments(args, kwargs, 1, "size", "sizes", "shape")
    shift = len(out.shape) - len(args[0].shape)
    shape = (1,) * shift + tuple(args[0].shape)
    grown = {dim: size for dim, size in enumerate(sizes) if shape[dim] == 1 and isinstance(size, Size) and size > 1}
    labels = _with_fresh(tracker, tracker.get(out), grown, zero=False)
    tracker.set(out, labels)
    _require_all(tracker, sizes, labels, 0)


def _expanded_as(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    """Let what is repeated along a dimension go with what it is repeated for."""
    labels, other = tracker.get(out), tracker.get(args[1] if len(args) > 1 else kwargs["other"])
    shift = len(out.shape) - len(args[0].shape)
    shape = (1,) * shift + tuple(args[0].shape)
    found = [block for block in other.blocks if all(shape[dim] == 1 for dim in block.dims)]
    blocks = tuple(Block(block.dims, block.atoms, False) for block in found)
    tracker.set(out, Labels(labels.shape, (*labels.blocks, *blocks)))


def _with_fresh(tracker: DimensionTracker, labels: Labels, sizes: Mapping[int, Any], *, zero: bool) -> Labels:
    """Return labels with new atoms along dimensions: whatever they meet says what they are."""
    blocks = [Block((dim,), tracker.atoms.new(int(size)), zero) for dim, size in sizes.items()]
    return Labels(labels.shape, (*labels.blocks, *blocks))


def _factory(first: int, *, zero: bool) -> Callable[..., None]:
    def made(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        sizes = _shape_arguments(args, kwargs, first, "size")
        if not isinstance(out, Tensor) or len(sizes) != len(out.shape):
            return
        known = {dim: size for dim, size in enumerate(sizes) if isinstance(size, Size) and size > 1}
        if known:
            labels = _with_fresh(tracker, Labels(tuple(out.shape)), known, zero=zero)
            tracker.set(out, labels)
            _require_all(tracker, sizes, labels, 0)

    return made


def _unflattened(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    sizes = args[2] if len(args) > 2 else kwargs["sizes"]
    _require_all(tracker, list(sizes), tracker.get(out), dim % len(args[0].shape))


def _splitted(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any], out: Sequence[Tensor]) -> None:
    sizes = args[1] if len(args) > 1 else kwargs.get("split_size_or_sections", kwargs.get("split_size"))
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % len(args[0].shape)
    each = [sizes] * len(out) if isinstance(sizes, int) else list(sizes or ())
    for size, part in zip(each, out, strict=False):
        tracker.require(size, tracker.get(part).of(dim), dim)


def _narrowed(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    given = dict(zip(("dim", "start", "length"), args[1:], strict=False)) | dict(kwargs)
    dim = given["dim"] % len(out.shape)
    tracker.require(given["length"], tracker.get(out).of(dim), dim)
    _require_prefix(tracker, args[0], dim, given["start"])


def _require_prefix(tracker: DimensionTracker, tensor: Tensor, dim: int, end: Any) -> None:
    """Require of the end of a slice that it is the number of indices before it."""
    labels = tracker.get(tensor)
    block = labels.of(dim)
    if isinstance(end, Size) and not isinstance(end.term, Count) and block is None:
        tracker.require(end, None, dim)
    if not isinstance(end, int) or block is None or end == 0:
        return
    if end < 0 or end > labels.shape[dim]:
        tracker.keep_whole(labels, [dim])
        return
    atoms = block.atoms.take(range(int(end)), block.dims.index(dim))
    tracker.require(end, Block(block.dims, atoms), dim)


def _indexed(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:  # noqa: ARG001
    """Require of the ends of slices that they are numbers of indices."""
    index = results_of(args[1]) if isinstance(args[1], tuple) else (args[1],)
    rank = len(args[0].shape)
    used = sum(_span(each) for each in index)
    dim = 0
    for each in index:
        if each is Ellipsis:
            dim += rank - used
            continue
        if isinstance(each, slice):
            for end in (cast("Any", each).start, cast("Any", each).stop):
                _require_prefix(tracker, args[0], dim, end)
        dim += _span(each)


def _span(index: Any) -> int:
    """Return how many dimensions one part of an index is for."""
    if index is None or index is Ellipsis or isinstance(index, bool):
        return 0
    return index.dim() if isinstance(index, Tensor) and index.dtype is torch.bool else 1


def _convolved(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    tracker.groups = args[6] if len(args) > 6 else kwargs.get("groups", 1)


def _convolved_back(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    tracker.groups = args[6] if len(args) > 6 else kwargs.get("groups", 1)


def _group_normed(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    tracker.groups = args[1] if len(args) > 1 else kwargs["num_groups"]


def _normed(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    tracker.normalized = args[1] if len(args) > 1 else kwargs["normalized_shape"]


def _rms_normed(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Require at once what the norm is given: it is run as a mean and products, which are given nothing."""
    shape: Sequence[Any] = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    labels = tracker.get(args[0])
    for size, dim in zip(shape, range(len(labels.shape) - len(shape), len(labels.shape)), strict=True):
        tracker.require(size, labels.of(dim), dim)


def _other(tracker: DimensionTracker, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Require of sizes that any other function is given that they stay what they are."""
    for value in (*args, *kwargs.values()):
        for size in cast("Sequence[Any]", value) if isinstance(value, (tuple, list)) else (value,):
            if isinstance(size, Size) and not (isinstance(size.term, Source) and not size.term.is_attribute):
                tracker.operator = name
                tracker.require(size, None, 0)


_BEFORE: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolved),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _convolved_back),
    "group_norm": _group_normed,
    "layer_norm": _normed,
    "rms_norm": _rms_normed,
}

_AFTER: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), _viewed),
    **dict.fromkeys(("expand", "broadcast_to"), _expanded),
    "expand_as": _expanded_as,
    "unflatten": _unflattened,
    **dict.fromkeys(("split", "split_with_sizes"), _splitted),
    "narrow": _narrowed,
    "__getitem__": _indexed,
    **dict.fromkeys(("zeros",), _factory(0, zero=True)),
    **dict.fromkeys(("ones", "empty", "rand", "randn", "full"), _factory(0, zero=False)),
    "new_zeros": _factory(1, zero=True),
    **dict.fromkeys(("new_ones", "new_full", "new_empty"), _factory(1, zero=False)),
}

_FREE = frozenset(
    ("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d group_norm layer_norm rms_norm chunk "
     "max_pool2d avg_pool2d adaptive_avg_pool2d batch_norm dropout").split()
)  # fmt: skip
"""Functions whose sizes are looked at elsewhere, or count nothing that is cut."""

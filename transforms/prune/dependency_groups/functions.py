"""See every function of torch that is called, with the sizes that it is given, and every operator that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ....compat import DispatchMode
from ....runtime.values import tensors_in
from .dimension_tracker import DimensionTracker
from .labels import Block, Labels
from .rules import RULES, WHOLE, results_of
from .sizes import Count, Size, Source

__all__ = ["Functions", "Operators"]


class Functions(TorchFunctionMode):
    """Give out sizes that know what they count, and note what the sizes that come back are used for."""

    def __init__(self, tracker: DimensionTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, tracker, name = kwargs or {}, self._tracker, getattr(func, "__name__", "")
        if tracker.silent:
            return func(*args, **given)
        if name == "__get__":
            out = func(*args)
            return _counted(tracker, args[0], out) if isinstance(out, torch.Size) else out
        if name == "size":
            dim = args[1] if len(args) > 1 else given.get("dim")
            sizes = _counted(tracker, args[0], args[0].shape)
            return sizes if dim is None else cast("Any", sizes)[dim]
        tracker.given = _argument(args, given, *_GIVEN[name]) if name in _GIVEN else None
        if name == "rms_norm":  # it is run as a mean and products, which are given nothing
            tracker.operator = name
            labels = tracker.get(args[0])
            _require_all(tracker, tracker.given, labels, len(labels.shape) - len(tracker.given))
        tracker.silent = name in WHOLE
        try:
            out = func(*args, **given)
        finally:
            tracker.silent, tracker.given = False, None
        tracker.operator = name if name in WHOLE or name in _AFTER else tracker.operator
        if name in WHOLE:
            WHOLE[name](tracker, args, given, out)
        elif name in _AFTER:
            _AFTER[name](tracker, args, given, out)
        elif name not in _FREE:
            _other(tracker, name, args, given)
        return out


def _counted(tracker: DimensionTracker, tensor: Tensor, shape: torch.Size) -> torch.Size:
    if not tracker.knows(tensor):
        return shape
    sizes: list[int] = list(shape)
    for block in tracker.look(tensor).blocks:
        for axis, dim in enumerate(block.dims):
            sizes[dim] = Size(sizes[dim], Count(block.atoms, axis))
    return torch.Size(sizes)


_Seen: TypeAlias = "Callable[[DimensionTracker, Sequence[Any], Mapping[str, Any], Any], None]"


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str, default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _shape_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], first: int = 1) -> list[Any]:
    """Return sizes that are given one by one or as a sequence."""
    given = next((kwargs[name] for name in ("shape", "size", "sizes") if name in kwargs), None)
    if given is None and len(args) > first:
        given = list(args[first:]) if isinstance(args[first], int) else args[first]
    if isinstance(given, (tuple, list)):
        return list(cast("Sequence[Any]", given))
    return [] if given is None else [given]


def _require_all(tracker: DimensionTracker, sizes: Iterable[Any], labels: Labels, first: int = 0) -> None:
    for dim, size in enumerate(sizes, first):
        tracker.require(size, labels.of(dim), dim)


def _viewed(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Require of the sizes of a view that they are those of its result."""
    sizes = _shape_arguments(args, kwargs)
    if len(sizes) == len(out.shape):
        _require_all(tracker, sizes, tracker.get(out))


def _expanded(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    """Let what is repeated along a dimension be cut where the size that says how often may be."""
    sizes = _shape_arguments(args, kwargs)
    grown = {dim: sizes[dim] for dim in _of_one(args[0], out) if dim < len(sizes)}
    labels = _with_fresh(tracker, tracker.get(out), grown, zero=False)
    tracker.set(out, labels)
    _require_all(tracker, sizes, labels)


def _of_one(tensor: Tensor, expanded: Tensor) -> list[int]:
    """Return the dimensions along which a tensor is repeated where it is expanded."""
    shift = len(expanded.shape) - len(tensor.shape)
    return [dim for dim in range(len(expanded.shape)) if dim < shift or tensor.shape[dim - shift] == 1]


def _expanded_as(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    """Let what is repeated along a dimension go with what it is repeated for."""
    labels, other = tracker.get(out), tracker.get(args[1] if len(args) > 1 else kwargs["other"])
    found = [block for block in other.blocks if set(block.dims) <= set(_of_one(args[0], out))]
    blocks = tuple(Block(block.dims, block.atoms, False) for block in found)
    tracker.set(out, Labels(labels.shape, (*labels.blocks, *blocks)))


def _with_fresh(tracker: DimensionTracker, labels: Labels, sizes: Mapping[int, Any], *, zero: bool) -> Labels:
    """Return labels with new atoms along dimensions of known sizes: whatever they meet says what they are."""
    known = {dim: int(size) for dim, size in sizes.items() if isinstance(size, Size) and size > 1}
    blocks = [Block((dim,), tracker.new(size), zero) for dim, size in known.items()]
    return Labels(labels.shape, (*labels.blocks, *blocks))


def _factory(first: int, *, zero: bool) -> _Seen:
    def made(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        sizes = _shape_arguments(args, kwargs, first)
        if not isinstance(out, Tensor) or len(sizes) != len(out.shape):
            return
        labels = _with_fresh(tracker, Labels(tuple(out.shape)), dict(enumerate(sizes)), zero=zero)
        if labels.blocks:
            tracker.set(out, labels)
            _require_all(tracker, sizes, labels)

    return made


def _unflattened(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    dim, sizes = _argument(args, kwargs, 1, "dim"), _argument(args, kwargs, 2, "sizes")
    _require_all(tracker, sizes, tracker.get(out), dim % len(args[0].shape))


def _splitted(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any], out: Sequence[Tensor]) -> None:
    sizes = args[1] if len(args) > 1 else kwargs.get("split_size_or_sections", kwargs.get("split_size"))
    dim = _argument(args, kwargs, 2, "dim", 0) % len(args[0].shape)
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
        tracker.require(end, None)
    if not isinstance(end, int) or block is None or end == 0:
        return
    if end < 0 or end > labels.shape[dim]:
        tracker.keep_whole(labels, [dim])
        return
    atoms = block.atoms.take(range(int(end)), block.dims.index(dim))
    tracker.require(end, Block(block.dims, atoms), dim)


def _indexed(tracker: DimensionTracker, args: Sequence[Any], _: Mapping[str, Any], __: Any) -> None:
    """Require of the ends of slices that they are numbers of indices."""
    index = results_of(args[1]) if isinstance(args[1], tuple) else (args[1],)
    rank = len(args[0].shape)
    used = sum(_span(each) for each in index)
    dim = 0
    for each in index:
        if isinstance(each, slice):
            for end in (cast("Any", each).start, cast("Any", each).stop):
                _require_prefix(tracker, args[0], dim, end)
        dim += rank - used if each is Ellipsis else _span(each)


def _span(index: Any) -> int:
    """Return how many dimensions one part of an index is for."""
    if index is None or index is Ellipsis or isinstance(index, bool):
        return 0
    return index.dim() if isinstance(index, Tensor) and index.dtype is torch.bool else 1


def _other(tracker: DimensionTracker, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Require of sizes that any other function is given that they stay what they are."""
    for value in (*args, *kwargs.values()):
        for size in results_of(value):
            if isinstance(size, Size) and not (isinstance(size.term, Source) and not size.term.is_attribute):
                tracker.operator = name
                tracker.require(size, None)


_GIVEN: Mapping[str, tuple[int, str, Any]] = {
    **{f"conv{transposed}{rank}d": (6, "groups", 1) for transposed in ("", "_transpose") for rank in (1, 2, 3)},
    "group_norm": (1, "num_groups", None),
    **dict.fromkeys(("layer_norm", "rms_norm"), (1, "normalized_shape", None)),
}
"""Functions whose operators are asked what was given to the function: which argument, and its default."""

_AFTER: Mapping[str, _Seen] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), _viewed),
    **dict.fromkeys(("expand", "broadcast_to"), _expanded),
    "expand_as": _expanded_as,
    "unflatten": _unflattened,
    **dict.fromkeys(("split", "split_with_sizes"), _splitted),
    "narrow": _narrowed,
    "__getitem__": _indexed,
    "zeros": _factory(0, zero=True),
    **dict.fromkeys(("ones", "empty", "rand", "randn", "full"), _factory(0, zero=False)),
    "new_zeros": _factory(1, zero=True),
    **dict.fromkeys(("new_ones", "new_full", "new_empty"), _factory(1, zero=False)),
}

_FREE = frozenset((*_GIVEN, *"chunk max_pool2d avg_pool2d adaptive_avg_pool2d batch_norm dropout".split()))
"""Functions whose sizes are looked at elsewhere, or count nothing that is cut."""


_IGNORED = frozenset(
    "new_zeros new_ones new_full new_empty new_empty_strided empty_strided zeros ones full empty arange rand randn "
    "randint randperm linspace scalar_tensor _local_scalar_dense is_same_size sym_size sym_stride sym_numel size "
    "is_nonzero equal item record_stream set_ detach_ requires_grad_ _has_compatible_shallow_copy_type".split()
)
"""Operators whose result says nothing of the dimensions of their operands."""


class Operators(DispatchMode):
    """Follow the operators that run under this mode."""

    def __init__(self, tracker: DimensionTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        name = str(func._schema.name).partition("::")[2]
        tensors = [] if self._tracker.silent or name in _IGNORED else list(tensors_in((args, given)))
        if any(map(self._tracker.knows, tensors)):
            _follow(self._tracker, name, args, given, tensors, out)
        return out


def _follow(
    tracker: DimensionTracker, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], out: Any
) -> None:
    tracker.operator, tracker.named = name, kwargs
    in_place = name not in RULES and name.endswith("_")
    rule = RULES.get(name[:-1] if in_place else name)
    if rule is None or "out" in kwargs:
        for tensor in tensors:
            tracker.keep_whole(tracker.get(tensor))
        return
    found: Sequence[Labels | None] = results_of(rule(tracker, out, *args))
    for result, each in zip(results_of(out), found, strict=False):
        if isinstance(result, Tensor) and each is not None:
            tracker.set(result, each)
            base = result._base if in_place else None  # pyright: ignore[reportPrivateUsage]
            if base is not None and any(not block.zero for block in each.blocks):
                tracker.set(base, tracker.get(base).with_zero(False))

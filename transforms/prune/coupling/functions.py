"""See every function of torch that is called, with the sizes that it is given, and where these come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .following import Follower
from .labels import Block, Labels
from .rules import WHOLE, results_of
from .sizes import Count, Size, Source

__all__ = ["Functions"]


class Functions(TorchFunctionMode):
    """Give out sizes that know what they count, and note what the sizes that come back are used for."""

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self._follower = follower

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        follower = self._follower
        name = getattr(func, "__name__", "")
        if follower.silent:
            return func(*args, **given)
        if name == "__get__":
            return _property(follower, func, args)
        if name == "size":
            return _size(follower, args, given)
        if name in WHOLE:
            return _followed_whole(follower, name, func, args, given)
        before = _BEFORE.get(name)
        if before is not None:
            before(follower, args, given)
        out = func(*args, **given)
        after = _AFTER.get(name)
        if after is not None:
            follower.operator = name
            after(follower, args, given, out)
        elif name not in _FREE:
            _other(follower, name, args, given)
        return out


def _followed_whole(follower: Follower, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    follower.silent = True
    try:
        out = func(*args, **kwargs)
    finally:
        follower.silent = False
    follower.operator = name
    WHOLE[name](follower, args, kwargs, out)
    return out


def _property(follower: Follower, func: Any, args: Sequence[Any]) -> Any:
    out = func(*args)
    return _counted(follower, args[0], out) if isinstance(out, torch.Size) else out


def _size(follower: Follower, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    sizes = _counted(follower, args[0], args[0].shape)
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return sizes if dim is None else cast("Any", sizes)[dim]


def _counted(follower: Follower, tensor: Tensor, shape: torch.Size) -> torch.Size:
    if not follower.knows(tensor):
        return shape
    labels = follower.look(tensor)
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


def _viewed(follower: Follower, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Require of the sizes of a view that they are those of its result."""
    sizes = _shape_arguments(args, kwargs, 1, "shape", "size", "sizes")
    if len(sizes) == len(out.shape):
        _require_all(follower, sizes, follower.get(out), 0)


def _require_all(follower: Follower, sizes: Sequence[Any], labels: Labels, first: int) -> None:
    for dim, size in enumerate(sizes, first):
        follower.require(size, labels.of(dim), dim)


def _expanded(follower: Follower, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    """Let what is repeated along a dimension be cut where the size that says how often may be."""
    sizes = _shape_arguments(args, kwargs, 1, "size", "sizes", "shape")
    shift = len(out.shape) - len(args[0].shape)
    shape = (1,) * shift + tuple(args[0].shape)
    grown = {dim: size for dim, size in enumerate(sizes) if shape[dim] == 1 and isinstance(size, Size) and size > 1}
    labels = _with_fresh(follower, follower.get(out), grown, zero=False)
    follower.set(out, labels)
    _require_all(follower, sizes, labels, 0)


def _expanded_as(follower: Follower, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    """Let what is repeated along a dimension go with what it is repeated for."""
    labels, other = follower.get(out), follower.get(args[1] if len(args) > 1 else kwargs["other"])
    shift = len(out.shape) - len(args[0].shape)
    shape = (1,) * shift + tuple(args[0].shape)
    found = [block for block in other.blocks if all(shape[dim] == 1 for dim in block.dims)]
    blocks = tuple(Block(block.dims, block.atoms, False) for block in found)
    follower.set(out, Labels(labels.shape, (*labels.blocks, *blocks)))


def _with_fresh(follower: Follower, labels: Labels, sizes: Mapping[int, Any], *, zero: bool) -> Labels:
    """Return labels with new atoms along dimensions: whatever they meet says what they are."""
    blocks = [Block((dim,), follower.atoms.new(int(size)), zero) for dim, size in sizes.items()]
    return Labels(labels.shape, (*labels.blocks, *blocks))


def _factory(first: int, *, zero: bool) -> Callable[..., None]:
    def made(follower: Follower, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        sizes = _shape_arguments(args, kwargs, first, "size")
        if not isinstance(out, Tensor) or len(sizes) != len(out.shape):
            return
        known = {dim: size for dim, size in enumerate(sizes) if isinstance(size, Size) and size > 1}
        if known:
            labels = _with_fresh(follower, Labels(tuple(out.shape)), known, zero=zero)
            follower.set(out, labels)
            _require_all(follower, sizes, labels, 0)

    return made


def _unflattened(follower: Follower, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    sizes = args[2] if len(args) > 2 else kwargs["sizes"]
    _require_all(follower, list(sizes), follower.get(out), dim % len(args[0].shape))


def _splitted(follower: Follower, args: Sequence[Any], kwargs: Mapping[str, Any], out: Sequence[Tensor]) -> None:
    sizes = args[1] if len(args) > 1 else kwargs.get("split_size_or_sections", kwargs.get("split_size"))
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % len(args[0].shape)
    each = [sizes] * len(out) if isinstance(sizes, int) else list(sizes or ())
    for size, part in zip(each, out, strict=False):
        follower.require(size, follower.get(part).of(dim), dim)


def _narrowed(follower: Follower, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
    given = dict(zip(("dim", "start", "length"), args[1:], strict=False)) | dict(kwargs)
    dim = given["dim"] % len(out.shape)
    follower.require(given["length"], follower.get(out).of(dim), dim)
    _require_prefix(follower, args[0], dim, given["start"])


def _require_prefix(follower: Follower, tensor: Tensor, dim: int, end: Any) -> None:
    """Require of the end of a slice that it is the number of indices before it."""
    labels = follower.get(tensor)
    block = labels.of(dim)
    if isinstance(end, Size) and not isinstance(end.term, Count) and block is None:
        follower.require(end, None, dim)
    if not isinstance(end, int) or block is None or end == 0:
        return
    if end < 0 or end > labels.shape[dim]:
        follower.keep_whole(labels, [dim])
        return
    atoms = block.atoms.take(range(int(end)), block.dims.index(dim))
    follower.require(end, Block(block.dims, atoms), dim)


def _indexed(follower: Follower, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:  # noqa: ARG001
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
                _require_prefix(follower, args[0], dim, end)
        dim += _span(each)


def _span(index: Any) -> int:
    """Return how many dimensions one part of an index is for."""
    if index is None or index is Ellipsis or isinstance(index, bool):
        return 0
    return index.dim() if isinstance(index, Tensor) and index.dtype is torch.bool else 1


def _convolved(follower: Follower, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    follower.groups = args[6] if len(args) > 6 else kwargs.get("groups", 1)


def _convolved_back(follower: Follower, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    follower.groups = args[6] if len(args) > 6 else kwargs.get("groups", 1)


def _group_normed(follower: Follower, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    follower.groups = args[1] if len(args) > 1 else kwargs["num_groups"]


def _normed(follower: Follower, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    follower.normalized = args[1] if len(args) > 1 else kwargs["normalized_shape"]


def _rms_normed(follower: Follower, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Require at once what the norm is given: it is run as a mean and products, which are given nothing."""
    shape: Sequence[Any] = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    labels = follower.get(args[0])
    for size, dim in zip(shape, range(len(labels.shape) - len(shape), len(labels.shape)), strict=True):
        follower.require(size, labels.of(dim), dim)


def _other(follower: Follower, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Require of sizes that any other function is given that they stay what they are."""
    for value in (*args, *kwargs.values()):
        for size in cast("Sequence[Any]", value) if isinstance(value, (tuple, list)) else (value,):
            if isinstance(size, Size) and not (isinstance(size.term, Source) and not size.term.is_attribute):
                follower.operator = name
                follower.require(size, None, 0)


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

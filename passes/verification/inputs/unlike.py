"""Calls unlike an example in one way: halves, small or far from zero, laid out otherwise, empty, uneven."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ....operators import CHANNELS_LAST
from ....runtime.values import Arguments, TensorFunction, map_tensors
from .derived import another_size, is_ordinary, one_for_another, resized, rows_of
from .drawn import leaves_of

__all__ = ["elsewhere", "far_from_zero", "halves", "no_rows", "nothing", "small", "uneven"]

_SMALL = 1e-6
"""Of numbers so small, one and their square are rounding: what subtracts one again shows that."""

_FAR = 1000.0
"""Of numbers so many times their spread away from zero, six digits of the squares cancel."""

_HALVES = 3.0
"""Rounded to halves, the largest numbers become at least so large, that there are several to tell apart."""

_MOST_UNEVEN = 6
"""So many uneven calls are offered: each that the original does not take costs a part of a run."""


def halves(arguments: Arguments) -> Arguments | None:
    """Return the call with floats rounded to halves: what is at a bound, equal, or between two integers."""

    def rounded(tensor: Tensor) -> Tensor:
        largest = float(tensor.abs().max())
        factor = 2 * max(1.0, _HALVES / largest if largest else 1.0)
        return (factor * tensor).round() / 2

    return _with_floats(arguments, rounded)


def small(arguments: Arguments) -> Arguments | None:
    """Return the call with floats near zero."""
    return _with_floats(arguments, lambda tensor: _SMALL * tensor)


def far_from_zero(arguments: Arguments) -> Arguments | None:
    """Return the call with floats far from zero, and as far apart as they were."""
    sizes = [float(tensor.abs().mean()) for tensor in leaves_of(arguments) if is_ordinary(tensor)]
    return _with_floats(arguments, lambda tensor: tensor + _FAR * sizes[0])


def _with_floats(arguments: Arguments, change: TensorFunction) -> Arguments | None:
    """Return the call with its floats changed; None where there are none, or too narrow ones."""
    floats = [tensor for tensor in leaves_of(arguments) if is_ordinary(tensor)]
    if not floats or any(tensor.dtype.itemsize < 4 for tensor in floats):
        return None
    return map_tensors(lambda x: change(x.detach()).to(x.dtype) if is_ordinary(x) else x, arguments)


def no_rows(arguments: Arguments) -> Arguments | None:
    """Return the call with no rows."""
    rows = rows_of(arguments)
    return resized(arguments, {0: {rows: 0}}) if rows else None


def nothing(arguments: Arguments) -> Arguments | None:
    """Return the call with zeros for integers and no truths: padding alone, and nothing that a mask lets pass."""
    changed = False

    def clear(tensor: Tensor) -> Tensor:
        nonlocal changed
        if tensor.is_floating_point() or tensor.is_complex() or tensor.layout is not torch.strided or not tensor.any():
            return tensor
        changed = True
        return torch.zeros_like(tensor)

    cleared = map_tensors(clear, arguments)
    return cleared if changed else None


def elsewhere(arguments: Arguments) -> Arguments:
    """Return the call with the same values, pictures laid out channels last, all behind an element of their memory."""

    def lay_out(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or not tensor.numel() or type(tensor) is not Tensor:
            return tensor
        layout = CHANNELS_LAST.get(tensor.dim(), torch.contiguous_format)
        strides = tensor.detach().contiguous(memory_format=layout).stride()
        place = tensor.new_empty(tensor.numel() + 1).as_strided(tensor.shape, strides, 1)
        return place.copy_(tensor.detach())

    return map_tensors(lay_out, arguments)


def uneven(arguments: Arguments) -> Iterator[Arguments]:
    """Yield calls in which sizes differ that are equal by chance: of height and width, of two arguments."""
    rows = rows_of(arguments)
    if not rows:
        return
    tensors = [tensor for tensor in leaves_of(arguments) if tensor.layout is torch.strided]
    made = [*_wider(arguments, rows, tensors), *_apart(arguments, tensors, 1), *_apart(arguments, tensors, 0)]
    yield from made[:_MOST_UNEVEN]


def _wider(arguments: Arguments, rows: int, tensors: list[Tensor]) -> Iterator[Arguments]:
    """Yield calls of a row with pictures that are no squares any more."""
    sides = {tensor.shape[3] for tensor in tensors if tensor.dim() == 4 and tensor.shape[2] == tensor.shape[3]}
    for wide in ({size: another_size(size) for size in sides}, {size: 2 * size for size in sides}):
        if sides:
            yield resized(arguments, {0: {rows: 1}, 3: wide})


def _apart(arguments: Arguments, tensors: list[Tensor], dim: int) -> Iterator[Arguments]:
    """Yield calls in which arguments have other sizes along a dimension than they share now: all, then each alone."""
    sizes = [size for tensor in tensors for size in tensor.shape[: dim + 1]]
    alone = [(tensor, _other(tensor, dim, at)) for at, tensor in enumerate(tensors) if _may_differ(tensor, dim, sizes)]
    if len(alone) > 1:
        yield _with(arguments, alone)
    for each in alone:
        yield _with(arguments, [each])


def _may_differ(tensor: Tensor, dim: int, sizes: list[int]) -> bool:
    """Say whether a tensor has a size along a dimension that others have, and which is not its width."""
    is_length = dim == 0 or tensor.dim() > 2 or not tensor.is_floating_point()
    return tensor.dim() > dim and is_length and tensor.shape[dim] > 1 and sizes.count(tensor.shape[dim]) > 1


def _other(tensor: Tensor, dim: int, more: int) -> Tensor:
    """Return a tensor whose size along a dimension is another one; of several, each gets its own."""
    size = tensor.shape[dim]
    return resized(((tensor,), {}), {dim: {size: another_size(size) + more}})[0][0]


def _with(arguments: Arguments, changed: list[tuple[Tensor, Tensor]]) -> Arguments:
    for old, new in changed:
        arguments = map_tensors(one_for_another(new, old), arguments)
    return arguments

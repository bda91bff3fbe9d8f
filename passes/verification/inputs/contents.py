"""Calls with other contents than an example: signs, magnitudes, identifiers, masks, layouts, and what is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ....operators import CHANNELS_LAST
from ....runtime.values import Arguments, TensorFunction, map_tensors
from ..float64 import Table
from .noise import stands_for_infinity
from .sizes import FEW_AND_ODD, another_size, inner_sizes, leaves_of, named_tensors, resized, rows_of, swapped

__all__ = [
    "alike", "are_same", "elsewhere", "far_from_zero", "halves", "no_rows", "not_finite", "nothing", "one_row",
    "other_rows", "other_strides", "permuted", "small", "zeros",
]  # fmt: skip

_FACTORS = (100.0, -1.0, -100.0, 1.0)
"""What the rows of a derived call are multiplied by, in turn."""

_SMALL = 1e-6
"""Of numbers so small, one and their square are rounding: what subtracts one again shows that."""

_FAR = 1000.0
"""Of numbers so many times their spread away from zero, six digits of the squares cancel."""

_HALVES = 3.0
"""Rounded to halves, the largest numbers become at least so large, that there are several to tell apart."""

_SPREAD = 0.5
"""Rows are scaled by up to this much up and down: a router without a bias picks the same, and rows still differ."""

_BYTES = Table(256)


# Of all kinds at once


def other_rows(
    arguments: Arguments, tables: Mapping[str, Table], seed: int, *, more: bool = False
) -> Iterator[Arguments]:
    """Yield calls with another number of rows (three, or one `more`), large and negative, with identifiers from whole
    tables and other masks, the farthest from the example first. Integers that are compared, or say where to write, take
    values that the call has.
    """
    rows = rows_of(arguments)
    if not rows:
        return
    count = rows + 1 if more or rows == FEW_AND_ODD else min(FEW_AND_ODD, rows + 1)
    drawn = _Drawn(arguments, tables, seed)
    # Numbers that pick from no table are scaled, too; the sign is kept where the original is not defined below zero.
    for factors, integers in ((_FACTORS, True), (_FACTORS, False), ((100.0, 0.5), False), ((1.0,), False)):
        change = _scaled(count, factors, integers)
        yield drawn.over(resized(arguments, {0: {rows: count}}), change, exchanged=integers)
    yield drawn.over(arguments, _scaled(rows, _FACTORS, integers=False))


def one_row(arguments: Arguments, tables: Mapping[str, Table], seed: int) -> Iterator[Arguments]:
    """Yield calls with the first row alone, nothing masked; at first with an inner size that is odd and smaller."""
    rows = rows_of(arguments)
    if not rows:
        return
    drawn, first = _Drawn(arguments, tables, seed, masks=False), resized(arguments, {0: {rows: 1}})
    for inner in inner_sizes(arguments):
        sizes = {size: another_size(size) for size in inner}
        yield drawn.over(resized(first, dict.fromkeys(range(1, 6), sizes)))
    yield drawn.over(first)
    yield first


def _scaled(rows: int, factors: tuple[float, ...], integers: bool) -> TensorFunction:
    """Return what multiplies the rows of tensors that have `rows` of them."""

    def change(tensor: Tensor) -> Tensor:
        counts = integers and tensor.dtype in (torch.int64, torch.int32)
        if not (counts or _is_ordinary(tensor)) or not tensor.dim() or len(tensor) != rows:
            return tensor
        column = torch.tensor([factors[row % len(factors)] for row in range(rows)], dtype=torch.float64)
        shape = (-1, *(1 for _ in tensor.shape[1:]))
        return (tensor.detach() * column.view(shape).to(tensor.device)).to(tensor.dtype)

    return change


class _Drawn:
    """Draw identifiers from the whole of their tables, and masks anew; exchange those of which only some are known."""

    def __init__(self, arguments: Arguments, tables: Mapping[str, Table], seed: int, *, masks: bool = True) -> None:
        names = {id(tensor): name for name, tensor in named_tensors(arguments).items()}
        self._tables = [tables.get(names.get(id(tensor), "")) for tensor in leaves_of(arguments)]
        self._seed, self._masks = seed, masks

    def over(self, arguments: Arguments, change: TensorFunction | None = None, *, exchanged: bool = False) -> Arguments:
        """Return a call with identifiers and masks drawn (numbers that are all zeros and ones are a mask beside others)
        and all other tensors changed. Identifiers of which only some values are known are exchanged, or stay.
        """
        tables, alone = iter(self._tables), all(_is_binary(tensor) for tensor in leaves_of(arguments))
        generator = torch.Generator().manual_seed(self._seed)

        def draw(tensor: Tensor) -> Tensor:
            table = next(tables)
            if table is not None and table.length:
                return _identifiers(tensor, table, generator)
            if table is not None:
                return self._exchanged(tensor, generator) if exchanged else tensor
            if tensor.dtype is torch.uint8 and exchanged and bool((tensor > 1).any()):
                return _identifiers(tensor, _BYTES, generator)
            if tensor.dtype is torch.bool:
                return self._mask(tensor, generator)
            if alone or not _is_binary(tensor):
                return tensor if change is None else change(tensor)
            return self._mask(tensor.detach().bool(), generator).to(tensor.dtype)

        return map_tensors(draw, arguments)

    def _exchanged(self, numbers: Tensor, generator: torch.Generator) -> Tensor:
        """Return a mask of zeros and ones changed; other identifiers in another order of their rows."""
        if numbers.dim() > 1 and _is_binary(numbers):
            return self._mask(numbers.bool(), generator).to(numbers.dtype)
        return numbers.roll(1, 0) if numbers.dim() else numbers

    def _mask(self, mask: Tensor, generator: torch.Generator) -> Tensor:
        """Return a mask with about a third of its places the other way, or with none."""
        if not self._masks or not mask.dim():
            return ~mask if self._masks else torch.ones_like(mask)
        other = (torch.rand(mask.shape, generator=generator) < 1 / 3).to(mask.device)
        other[..., :1] = False
        return mask ^ other


def _is_binary(tensor: Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and tensor.dim() > 0 and tensor.numel() > 0 and not tensor.is_complex()
    return is_plain and bool(((tensor == 0) | (tensor == 1)).all())


def _identifiers(like: Tensor, table: Table, generator: torch.Generator) -> Tensor:
    """Return identifiers over a whole table; where there is room, its ends are among them, and what stands apart."""
    drawn = torch.randint(0, table.length, like.shape, generator=generator)
    flat = drawn.view(-1)
    flat[:2] = torch.tensor([table.length - 1, 0])[: flat.numel()]
    if table.apart is not None:
        flat[2::3] = table.apart
    return drawn.to(device=like.device, dtype=like.dtype)


# Of floats


def _is_ordinary(tensor: Tensor) -> bool:
    """Say whether a tensor is of floats, and none of these stands for infinity."""
    is_float = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and tensor.layout is torch.strided
    return is_float and tensor.numel() > 0 and not stands_for_infinity(tensor)


def zeros(arguments: Arguments) -> Arguments:
    """Return the call with zeros in the place of all floats, save what stands for infinity."""
    return map_tensors(lambda x: torch.zeros_like(x) if _is_ordinary(x) else x, arguments)


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
    sizes = [float(tensor.abs().mean()) for tensor in leaves_of(arguments) if _is_ordinary(tensor)]
    return _with_floats(arguments, lambda tensor: tensor + _FAR * sizes[0])


def _with_floats(arguments: Arguments, change: Callable[[Tensor], Tensor]) -> Arguments | None:
    """Return the call with its floats changed; None where there are none, or too narrow ones."""
    floats = [tensor for tensor in leaves_of(arguments) if _is_ordinary(tensor)]
    if not floats or any(tensor.dtype.itemsize < 4 for tensor in floats):
        return None
    return map_tensors(lambda x: change(x.detach()).to(x.dtype) if _is_ordinary(x) else x, arguments)


def not_finite(arguments: Arguments) -> Iterator[Arguments]:
    """Yield calls of at least three rows with NaN in the last and infinity in the one before, in one argument of
    ordinary floats each.
    """
    rows = rows_of(arguments)
    made = resized(arguments, {0: {rows: max(rows, FEW_AND_ODD)}}) if rows else arguments
    for chosen in leaves_of(made):
        if _is_ordinary(chosen) and chosen.dim() and len(chosen) == max(rows, FEW_AND_ODD):
            spoilt = chosen.detach().clone()
            spoilt[-1].flatten()[:1], spoilt[-2] = torch.nan, torch.inf
            yield swapped(made, (chosen, spoilt))


# Of nothing


def no_rows(arguments: Arguments) -> Arguments | None:
    """Return the call with no rows."""
    rows = rows_of(arguments)
    return resized(arguments, {0: {rows: 0}}) if rows else None


def nothing(arguments: Arguments) -> Iterator[Arguments]:
    """Yield the call with zeros for integers and no truths, if it has any: padding, masks that let nothing pass."""

    def has_any(tensor: Tensor) -> bool:
        is_number = tensor.is_floating_point() or tensor.is_complex() or tensor.layout is not torch.strided
        return not is_number and bool(tensor.any())

    if any(map(has_any, leaves_of(arguments))):
        yield map_tensors(lambda x: torch.zeros_like(x) if has_any(x) else x, arguments)


# Of rows


def alike(arguments: Arguments) -> Iterator[Arguments]:
    """Yield calls in which every row is a multiple of one row, of either sign; of integers, that row itself. In a
    mixture all rows then go to the same experts, which are full, and all others are empty.
    """
    for quarter in range(4):
        sign = (1, -1)[quarter % 2]
        yield map_tensors(lambda x, quarter=quarter, sign=sign: _multiples(x, quarter, sign), arguments)


def permuted(arguments: Arguments) -> Arguments:
    """Return the call with the rows of each sequence in the opposite order."""
    return map_tensors(lambda x: x.flip(-2) if _has_rows(x) else x, arguments)


def _has_rows(tensor: Tensor) -> bool:
    is_number = tensor.dtype is not torch.bool and not tensor.is_complex()
    return is_number and tensor.ndim > 1 and tensor.shape[-2] > 1 and not stands_for_infinity(tensor)


def _multiples(tensor: Tensor, quarter: int, sign: int) -> Tensor:
    if not _has_rows(tensor):
        return tensor
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    same = rows[quarter * (len(rows) - 1) // 3].expand_as(rows)
    if tensor.is_floating_point():
        factors = torch.linspace(1 - _SPREAD, 1 + _SPREAD, len(rows), device=tensor.device).to(tensor.dtype)
        same = sign * factors[:, None] * same
    return same.reshape(tensor.shape).clone()


# Laid out otherwise


def other_strides(arguments: Arguments) -> Arguments:
    """Return the call with the same values, laid out in memory as if the last two dimensions had been exchanged."""

    def lay_out(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.dim() < 2:
            return tensor
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)

    return map_tensors(lay_out, arguments)


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


def are_same(call: Arguments, other: Arguments) -> bool:
    """Say whether two calls of one form have the same tensors, or equal ones."""
    tensors, others = (list(named_tensors(each).values()) for each in (call, other))
    return len(tensors) == len(others) and all(
        one is two or (one.layout is torch.strided and one.stride() == two.stride() and torch.equal(one, two))
        for one, two in zip(tensors, others, strict=True)
    )

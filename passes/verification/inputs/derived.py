"""Calls derived from one call: what an example does not show of sizes, signs, magnitudes, identifiers and masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ....runtime.values import Arguments, TensorFunction, flatten, map_tensors
from ..float64 import Table
from .drawn import Drawn, leaves_of
from .noise import perturbed_inputs, stands_for_infinity

__all__ = [
    "another_size",
    "are_same",
    "few_rows",
    "inner_sizes",
    "is_of_edges",
    "is_ordinary",
    "larger",
    "longer",
    "many_rows",
    "not_finite",
    "one_for_another",
    "one_row",
    "other_rows",
    "other_strides",
    "resized",
    "rows_of",
    "smaller",
    "zeros",
]

_FACTORS = (100.0, -1.0, -100.0, 1.0)
"""What the rows of a derived call are multiplied by, in turn."""


_LEAST = 3
"""No dimension of a smaller call is made shorter than this."""

_FEW, _ODD, _SHORT = 8, 3, 8
"""So many rows are few, so many are few and odd; so many elements along another dimension are few.

Two would be too few: a norm over a batch of two gives plus and minus one, whose gradients are rounding alone. And the
fewer there are, the less they say of how far rounding leads.
"""

_NODES = 64
"""So many nodes of a graph are few."""

_OFTEN_HALVED = 32
"""Images are halved five times in most networks; those that join the halves again take multiples of this."""

_MANY = 131
"""So many rows are more than a part of 128, and no multiple of anything."""

_LIGHT = 200_000_000
"""A module takes about as many operations for a number of a call as it holds: so many cost a hundredth of a second."""

_SMALL = 1 << 14
"""A call of so many numbers costs next to nothing."""


def other_rows(
    arguments: Arguments, tables: Mapping[str, Table], seed: int, *, more: bool = False
) -> Iterator[Arguments]:
    """Yield calls with another number of rows, large and negative, identifiers from whole tables, masks changed.

    The first is the farthest from the example, the last the nearest: the one to take is the first that the original
    takes. Integers that are compared with numbers, or say where to write, take values that the call has.

    Args:
        arguments: of the call.
        tables: the integer arguments that pick from tables, with the tables' lengths; 0 where that is not known.
        seed: of identifiers and masks.
        more: with one row more; else with three, which is cheaper, or one more than there are.
    """
    rows = rows_of(arguments)
    if not rows:
        return
    drawn, count = Drawn(_tables(arguments, tables), seed), rows + 1 if more else min(_ODD, rows + 1)
    if count == rows:
        count += 1
    # Numbers that pick from no table are scaled, too; the sign is kept where the original is not defined below zero.
    for factors, integers in ((_FACTORS, True), (_FACTORS, False), ((100.0, 0.5), False), ((1.0,), False)):
        change = _scaled(count, factors, integers)
        yield drawn.over(resized(arguments, {0: {rows: count}}), change, exchanged=integers)
    yield drawn.over(arguments, _scaled(rows, _FACTORS, integers=False))


def many_rows(
    arguments: Arguments, example: Arguments, seed: int, *, numbers: bool = True, weight: int = 0
) -> Arguments | None:
    """Return the call with at least twice the rows and the numbers of an example; of a small one, with four times.

    Args:
        arguments: of the call: the example, or a smaller one made of it.
        example: the call as it was recorded.
        seed: of the noise.
        numbers: have more numbers, too; else more rows alone.
        weight: how many numbers the module holds. A light one takes a call of so many rows that ways of computing
            which cut a batch into parts show what they do with the rest.
    """
    rows, least = rows_of(arguments), rows_of(example)
    size, wanted = _size(arguments), _size(example)
    if not rows or not size:
        return None
    times = 4 if wanted <= _SMALL else 2
    count = max(times * least, -(-times * wanted * rows // size) if numbers else 0)
    if weight and weight * size * _MANY <= _LIGHT * rows:
        count = max(count, _MANY)
    return _repeated(arguments, {0: {rows: count}}, seed)


def larger(arguments: Arguments, example: Arguments, seed: int) -> Iterator[Arguments]:
    """Yield calls with more rows than an example: at first longer, too; only those that cost next to nothing.

    Args:
        arguments: of the call: the example, or a smaller one made of it.
        example: the call as it was recorded.
        seed: of the noise.
    """
    rows, least = rows_of(arguments), rows_of(example)
    if not rows:
        return
    for inner in inner_sizes(example):
        sizes = {dim: {size: 2 * size + 1 for size in inner} for dim in range(1, 6)}
        if _size(example) * 2 * 2 ** len(inner) <= _SMALL:
            yield _repeated(example, {0: {least: 2 * least + 1}, **sizes}, seed)
    if _size(arguments) * (2 * least + 1) <= _SMALL * rows:
        yield _repeated(arguments, {0: {rows: 2 * least + 1}}, seed)


def longer(arguments: Arguments, example: Arguments, seed: int, *, barely: bool = False) -> Arguments | None:
    """Return a call of two rows, more than twice as long or wide as an example; None where no other length is known.

    Args:
        arguments: a smaller call made of the example: the sizes in which it differs may be other ones.
        example: the call as it was recorded.
        seed: of the noise.
        barely: make one row, longer by a quarter and one.
    """
    pairs = zip(_tensors(arguments).values(), _tensors(example).values(), strict=True)
    known = {old for one, two in pairs for new, old in zip(one.shape[1:], two.shape[1:], strict=True) if new != old}
    if not known:
        return None
    sizes = {old: 1 + (old + old // 4 if barely else 2 * old) for old in known}
    return _repeated(example, {0: {rows_of(example): 1 if barely else 2}, **dict.fromkeys(range(1, 6), sizes)}, seed)


def not_finite(arguments: Arguments) -> Iterator[Arguments]:
    """Yield calls of at least three rows with NaN in the last and infinity in the one before, of one argument each.

    Those are spoilt that hold ordinary floats.
    """
    rows = rows_of(arguments)
    made = resized(arguments, {0: {rows: max(rows, _ODD)}}) if rows else arguments
    for chosen in leaves_of(made):
        if is_ordinary(chosen) and chosen.dim() and len(chosen) == max(rows, _ODD):
            spoilt = chosen.detach().clone()
            spoilt[-1].flatten()[:1], spoilt[-2] = torch.nan, torch.inf
            yield map_tensors(one_for_another(spoilt, chosen), made)


def one_for_another(new: Tensor, old: Tensor) -> TensorFunction:
    """Return what puts a tensor in the place of another."""
    return lambda tensor: new if tensor is old else tensor


def are_same(call: Arguments, other: Arguments) -> bool:
    """Say whether two calls of one form have the same tensors, or equal ones."""
    tensors, others = ([v for v in flatten(each).values() if isinstance(v, Tensor)] for each in (call, other))
    return len(tensors) == len(others) and all(
        one is two or (one.layout is torch.strided and one.stride() == two.stride() and torch.equal(one, two))
        for one, two in zip(tensors, others, strict=True)
    )


def _size(arguments: Arguments) -> int:
    return sum(tensor.numel() for tensor in _tensors(arguments).values())


def _repeated(arguments: Arguments, sizes: Mapping[int, Mapping[int, int]], seed: int) -> Arguments:
    """Return a call of other sizes, with noise on floats.

    What there is repeats, so that all integers are values that the call has. Numbers that ascend, as those of the
    graphs of a batch, do so still.
    """
    order = iter([_ascends(tensor) for tensor in leaves_of(arguments)])
    ascending = map_tensors(lambda x: x.sort()[0] if next(order) else x, resized(arguments, sizes))
    return perturbed_inputs(ascending, seed)


def _ascends(tensor: Tensor) -> bool:
    is_plain = tensor.dim() == 1 and tensor.dtype in (torch.int64, torch.int32) and tensor.layout is torch.strided
    return is_plain and bool((tensor[1:] >= tensor[:-1]).all())


def one_row(arguments: Arguments, tables: Mapping[str, Table], seed: int) -> Iterator[Arguments]:
    """Yield calls with the first row alone, nothing masked; at first with an inner size that is odd and smaller."""
    rows = rows_of(arguments)
    if not rows:
        return
    drawn = Drawn(_tables(arguments, tables), seed, masks=False)
    first = resized(arguments, {0: {rows: 1}})
    for inner in inner_sizes(arguments):
        yield drawn.over(
            resized(first, {dim: {size: another_size(size) for size in inner} for dim in range(1, 6)}), _kept
        )
    yield drawn.over(first, _kept)
    yield first


def few_rows(arguments: Arguments, count: int = _FEW) -> Arguments:
    """Return the call with its first rows alone."""
    rows = rows_of(arguments)
    return resized(arguments, {0: {rows: count}}) if rows > count else arguments


def smaller(arguments: Arguments) -> Iterator[Arguments]:
    """Yield the call with its first rows alone: at first with inner sizes of about a quarter, then with its own.

    What a module means seldom hangs on how long a sequence or how wide an image is; what a run of it costs does. Of a
    graph it is the first nodes, with edges among them.
    """
    graph = _few_nodes(arguments)
    if graph is not None:
        yield graph
    few = few_rows(arguments)
    for inner in inner_sizes(few):
        for reduced in (_quarter, _halved_often):
            sizes = {size: reduced(size) for size in inner}
            if any(size != less for size, less in sizes.items()):
                yield resized(few, dict.fromkeys(range(1, 6), sizes))
    yield few


def _few_nodes(arguments: Arguments) -> Arguments | None:
    """Return the call with the first nodes of a graph, and as many edges for each; None where nothing is like edges.

    Edges are pairs of integers [2, E] that name rows; what has E rows belongs to them. Where the first nodes are of
    several graphs, no edge may join two graphs: it is the edges that are among these nodes.
    """
    rows = rows_of(arguments)
    edges = next((each for each in leaves_of(arguments) if is_of_edges(each, rows)), None)
    if edges is None or rows <= _NODES:
        return None
    count = edges.shape[1]
    within = torch.arange(count, device=edges.device)[: max(1, count * _NODES // rows)]
    if any(_ascends(each) and len(each) == rows and each[0] != each[_NODES - 1] for each in leaves_of(arguments)):
        within = (edges < _NODES).all(0).nonzero().flatten()
        if not len(within):
            return None

    def cut(tensor: Tensor) -> Tensor:
        if tensor is edges:
            return tensor[:, within] % _NODES
        if not tensor.dim() or len(tensor) not in (rows, count):
            return tensor
        return tensor.detach()[:_NODES] if len(tensor) == rows else tensor.detach()[within]

    return map_tensors(cut, arguments)


def is_of_edges(tensor: Tensor, rows: int) -> bool:
    """Say whether a tensor is like the edges of a graph: pairs of integers [2, E] that name rows."""
    if tensor.dtype is not torch.int64 or tensor.layout is not torch.strided or tensor.dim() != 2 or len(tensor) != 2:
        return False
    return tensor.shape[1] > 0 and int(tensor.min()) >= 0 and int(tensor.max()) < rows


def _quarter(size: int) -> int:
    """Return an odd size of about a quarter, where that is less; one stays one."""
    return min(size, max(_LEAST, size // 4 // 2 * 2 + 1))


def _halved_often(size: int) -> int:
    """Return an even size of about a quarter, where that is less, for networks that join what they have halved."""
    return min(size, max(_OFTEN_HALVED, size // 4 // _OFTEN_HALVED * _OFTEN_HALVED))


def other_strides(arguments: Arguments) -> Arguments:
    """Return the call with the same values, laid out in memory as if the last two dimensions had been exchanged."""

    def lay_out(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.dim() < 2:
            return tensor
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)

    return map_tensors(lay_out, arguments)


def another_size(size: int) -> int:
    """Return an odd size of about a quarter; one more where there is little."""
    return size + 1 if size <= _SHORT else size // 4 // 2 * 2 + 3


def zeros(arguments: Arguments) -> Arguments:
    """Return the call with zeros in the place of all floats, save what stands for infinity."""
    return map_tensors(lambda x: torch.zeros_like(x) if is_ordinary(x) else x, arguments)


def _tensors(arguments: Arguments) -> dict[str, Tensor]:
    named = {**flatten(arguments[0], "input"), **flatten(arguments[1], "input")}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def rows_of(arguments: Arguments) -> int:
    """Return the size of the batch: that of the first tensor which has more than a value."""
    return next((len(tensor) for tensor in _tensors(arguments).values() if tensor.dim()), 0)


def inner_sizes(arguments: Arguments) -> Iterator[tuple[int, ...]]:
    """Yield sizes that may be lengths: of a sequence in the middle, or of what lies behind channels."""
    widest = max(_tensors(arguments).values(), key=Tensor.dim, default=None)
    if widest is None:
        return
    if widest.dim() == 2 and not widest.dtype.is_floating_point:
        yield (widest.shape[1],)
    if widest.dim() == 3:
        yield (widest.shape[1],)
    if widest.dim() >= 3:
        yield tuple(widest.shape[2:])


def resized(arguments: Arguments, sizes: Mapping[int, Mapping[int, int]]) -> Arguments:
    """Return a call in which dimensions of some sizes have others: what there is repeats, or ends earlier.

    Nodes that a batch of graphs has more belong to its last graph, so that no edge joins two graphs.

    Args:
        arguments: of the call.
        sizes: dimension -> old size -> new size.
    """
    rows = rows_of(arguments)
    is_graph = any(is_of_edges(each, rows) for each in leaves_of(arguments))

    def resize(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor
        for dim, size in enumerate(tensor.shape):
            new = sizes.get(dim, {}).get(size, size)
            if new != size and size:
                counted = torch.arange(new, device=tensor.device)
                picks = counted.clamp(max=size - 1) if is_graph and _ascends(tensor) else counted % size
                tensor = tensor.detach().index_select(dim, picks)
        return tensor

    return map_tensors(resize, arguments)


def _kept(tensor: Tensor) -> Tensor:
    return tensor


def _scaled(rows: int, factors: tuple[float, ...], integers: bool) -> TensorFunction:
    """Return what multiplies the rows of tensors that have `rows` of them."""

    def change(tensor: Tensor) -> Tensor:
        counts = tensor.dtype in (torch.int64, torch.int32)
        if not (is_ordinary(tensor) or (counts and integers)) or not tensor.dim() or len(tensor) != rows:
            return tensor
        column = torch.tensor([factors[row % len(factors)] for row in range(rows)], dtype=torch.float64)
        shape = (-1, *(1 for _ in tensor.shape[1:]))
        wide = tensor.detach() * column.view(shape).to(tensor.device)
        return wide.to(tensor.dtype)

    return change


def is_ordinary(tensor: Tensor) -> bool:
    """Say whether a tensor is of floats, and none of these stands for infinity."""
    is_float = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and tensor.layout is torch.strided
    return is_float and tensor.numel() > 0 and not stands_for_infinity(tensor)


def _tables(arguments: Arguments, tables: Mapping[str, Table]) -> list[Table | None]:
    """Return the table that each tensor of a call picks from, in the order in which calls are mapped."""
    names = {id(tensor): name for name, tensor in _tensors(arguments).items()}
    return [tables.get(names.get(id(tensor), "")) for tensor in leaves_of(arguments)]

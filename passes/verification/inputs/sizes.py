"""Calls of other sizes than an example: fewer rows, more, none, shorter or longer sequences, smaller images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ....runtime.values import Arguments, flatten, map_tensors
from .noise import perturbed_inputs

__all__ = [
    "FEW_AND_ODD", "another_size", "few_rows", "inner_sizes", "is_of_edges", "larger", "leaves_of", "longer",
    "many_rows", "named_tensors", "resized", "rows_of", "smaller", "swapped", "uneven", "with_rows",
]  # fmt: skip

_LEAST = 3
"""No dimension of a smaller call is made shorter than this."""

_FEW, FEW_AND_ODD, _SHORT = 8, 3, 8
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

_MOST_UNEVEN = 6
"""So many uneven calls are offered: each that the original does not take costs a part of a run."""

_INNER = range(1, 6)
"""The dimensions behind the rows."""


def named_tensors(arguments: Arguments) -> dict[str, Tensor]:
    """Return the tensors of a call by name."""
    named = {**flatten(arguments[0], "input"), **flatten(arguments[1], "input")}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def leaves_of(arguments: Arguments) -> list[Tensor]:
    """Return the tensors of a call, in the order in which calls are mapped."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, arguments)
    return found


def rows_of(arguments: Arguments) -> int:
    """Return the size of the batch: that of the first tensor which has more than a value."""
    return next((len(tensor) for tensor in named_tensors(arguments).values() if tensor.dim()), 0)


def inner_sizes(arguments: Arguments) -> Iterator[tuple[int, ...]]:
    """Yield sizes that may be lengths: of a sequence in the middle, or of what lies behind channels."""
    widest = max(named_tensors(arguments).values(), key=Tensor.dim, default=None)
    if widest is None:
        return
    if widest.dim() == 3 or (widest.dim() == 2 and not widest.dtype.is_floating_point):
        yield (widest.shape[1],)
    if widest.dim() >= 3:
        yield tuple(widest.shape[2:])


def resized(arguments: Arguments, sizes: Mapping[int, Mapping[int, int]]) -> Arguments:
    """Return a call in which dimensions of some sizes have others (`sizes`: dimension -> old -> new): what there is
    repeats, or ends earlier. Nodes that a batch of graphs has more belong to its last graph: no edge joins two.
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


def another_size(size: int) -> int:
    """Return an odd size of about a quarter; one more where there is little."""
    return size + 1 if size <= _SHORT else size // 4 // 2 * 2 + 3


def swapped(arguments: Arguments, *pairs: tuple[Tensor, Tensor]) -> Arguments:
    """Return the call with new tensors in the place of old ones, given as pairs of both."""
    for old, new in pairs:
        arguments = map_tensors(lambda x, old=old, new=new: new if x is old else x, arguments)
    return arguments


def with_rows(arguments: Arguments, count: int) -> Arguments | None:
    """Return a call with so many rows: what there is repeats, or ends earlier; None where it has no rows."""
    rows = rows_of(arguments)
    return resized(arguments, {0: {rows: count}}) if rows else None


# Fewer


def few_rows(arguments: Arguments, count: int = _FEW) -> Arguments:
    """Return the call with its first rows alone."""
    rows = rows_of(arguments)
    return resized(arguments, {0: {rows: count}}) if rows > count else arguments


def smaller(arguments: Arguments) -> Iterator[Arguments]:
    """Yield the call with its first rows alone: at first with inner sizes of about a quarter, then with its own; of
    a graph, its first nodes. What a module means seldom hangs on lengths; what a run of it costs does.
    """
    graph = _few_nodes(arguments)
    if graph is not None:
        yield graph
    few = few_rows(arguments)
    for inner in inner_sizes(few):
        for reduced in (_quarter, _halved_often):
            sizes = {size: reduced(size) for size in inner}
            if any(size != less for size, less in sizes.items()):
                yield resized(few, dict.fromkeys(_INNER, sizes))
    yield few


def _quarter(size: int) -> int:
    """Return an odd size of about a quarter, where that is less; one stays one."""
    return min(size, max(_LEAST, size // 4 // 2 * 2 + 1))


def _halved_often(size: int) -> int:
    """Return an even size of about a quarter, where that is less, for networks that join what they have halved."""
    return min(size, max(_OFTEN_HALVED, size // 4 // _OFTEN_HALVED * _OFTEN_HALVED))


def _few_nodes(arguments: Arguments) -> Arguments | None:
    """Return the call with the first nodes of a graph, and as many edges for each; of several graphs the first whole
    ones, with their edges. None where nothing is like edges.
    """
    rows, leaves = rows_of(arguments), leaves_of(arguments)
    edges = next((each for each in leaves if is_of_edges(each, rows)), None)
    if edges is None or rows <= _NODES:
        return None
    count, nodes = edges.shape[1], _NODES
    within = torch.arange(count, device=edges.device)[: max(1, count * _NODES // rows)]
    numbered = (each for each in leaves if _ascends(each) and len(each) == rows)
    of_graphs = next((each for each in numbered if each[0] != each[_NODES]), None)
    if of_graphs is not None:
        nodes = int((of_graphs[:_NODES] < of_graphs[_NODES]).sum())
        within = (edges < nodes).all(0).nonzero().flatten()
        if not len(within):
            return None

    def cut(tensor: Tensor) -> Tensor:
        if tensor is edges:
            return tensor[:, within] % nodes
        if not tensor.dim() or len(tensor) not in (rows, count):
            return tensor
        return tensor.detach()[:nodes] if len(tensor) == rows else tensor.detach()[within]

    return map_tensors(cut, arguments)


def is_of_edges(tensor: Tensor, rows: int) -> bool:
    """Say whether a tensor is like the edges of a graph: pairs of integers [2, E] that name rows."""
    if tensor.dtype is not torch.int64 or tensor.layout is not torch.strided or tensor.dim() != 2 or len(tensor) != 2:
        return False
    return tensor.shape[1] > 0 and int(tensor.min()) >= 0 and int(tensor.max()) < rows


def _ascends(tensor: Tensor) -> bool:
    is_plain = tensor.dim() == 1 and tensor.dtype in (torch.int64, torch.int32) and tensor.layout is torch.strided
    return is_plain and bool((tensor[1:] >= tensor[:-1]).all())


# More


def many_rows(
    arguments: Arguments, example: Arguments, seed: int, *, numbers: bool = True, weight: int = 0
) -> Arguments | None:
    """Return the call with at least twice the rows (and `numbers`) of its example; of a small one, four times. A module
    of little `weight` takes so many that a batch which is cut into parts has a rest.
    """
    rows, size, wanted = rows_of(arguments), _size(arguments), _size(example)
    if not rows or not size:
        return None
    times = 4 if wanted <= _SMALL else 2
    count = max(times * rows_of(example), -(-times * wanted * rows // size) if numbers else 0)
    if weight and weight * size * _MANY <= _LIGHT * rows:
        count = max(count, _MANY)
    return _repeated(arguments, {0: {rows: count}}, seed)


def larger(arguments: Arguments, example: Arguments, seed: int) -> Iterator[Arguments]:
    """Yield calls with more rows than an example: at first longer, too; only those that cost next to nothing."""
    rows, least = rows_of(arguments), rows_of(example)
    if not rows:
        return
    for inner in inner_sizes(example):
        if _size(example) * 2 * 2 ** len(inner) <= _SMALL:
            sizes = {dim: {size: 2 * size + 1 for size in inner} for dim in _INNER}
            yield _repeated(example, {0: {least: 2 * least + 1}, **sizes}, seed)
    if _size(arguments) * (2 * least + 1) <= _SMALL * rows:
        yield _repeated(arguments, {0: {rows: 2 * least + 1}}, seed)


def longer(arguments: Arguments, example: Arguments, seed: int, *, barely: bool = False) -> Arguments | None:
    """Return a call of two rows, more than twice as long or wide as an example, or of one row and `barely` longer;
    None where the smaller call `arguments`, made of it, shows no size that may be another one.
    """
    pairs = zip(named_tensors(arguments).values(), named_tensors(example).values(), strict=True)
    known = {old for one, two in pairs for new, old in zip(one.shape[1:], two.shape[1:], strict=True) if new != old}
    if not known:
        return None
    sizes = {old: 1 + (old + old // 4 if barely else 2 * old) for old in known}
    return _repeated(example, {0: {rows_of(example): 1 if barely else 2}, **dict.fromkeys(_INNER, sizes)}, seed)


def _size(arguments: Arguments) -> int:
    return sum(tensor.numel() for tensor in named_tensors(arguments).values())


def _repeated(arguments: Arguments, sizes: Mapping[int, Mapping[int, int]], seed: int) -> Arguments:
    """Return a call of other sizes, with noise on floats. What there is repeats, so that all integers are values
    that the call has; numbers that ascend, as those of the graphs of a batch, do so still.
    """
    order = iter([_ascends(tensor) for tensor in leaves_of(arguments)])
    ascending = map_tensors(lambda x: x.sort()[0] if next(order) else x, resized(arguments, sizes))
    return perturbed_inputs(ascending, seed)


# Unlike


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
    alone = [(each, _other(each, dim, at)) for at, each in enumerate(tensors) if _may_differ(each, dim, sizes)]
    if len(alone) > 1:
        yield swapped(arguments, *alone)
    for each in alone:
        yield swapped(arguments, each)


def _may_differ(tensor: Tensor, dim: int, sizes: list[int]) -> bool:
    """Say whether a tensor has a size along a dimension that others have, and which is not its width."""
    is_length = dim == 0 or tensor.dim() > 2 or not tensor.is_floating_point()
    return tensor.dim() > dim and is_length and tensor.shape[dim] > 1 and sizes.count(tensor.shape[dim]) > 1


def _other(tensor: Tensor, dim: int, more: int) -> Tensor:
    """Return a tensor whose size along a dimension is another one; of several, each gets its own."""
    size = tensor.shape[dim]
    return resized(((tensor,), {}), {dim: {size: another_size(size) + more}})[0][0]

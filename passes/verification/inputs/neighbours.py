"""Calls beside the example, to be timed: other batches, lengths, resolutions and layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....runtime.values import Arguments, map_tensors
from ....tracing.examples import Inputs
from .derived import inner_sizes, is_of_edges, resized, rows_of
from .drawn import leaves_of

__all__ = ["Neighbour", "neighbours"]

_FACTORS = (4, 2)
"""Batches are taken so many times as large: the larger one first, the other where that takes too long."""

_MASKED = 2

_SHORTEST = 8
"""Nothing shorter is halved."""

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Dimensions of images and volumes -> their layout in which channels lie together."""


@dataclass(frozen=True)
class Neighbour:
    """Calls of another size or layout than the recorded ones.

    Attributes:
        label: what is other, for the report.
        calls: as many as were recorded.
        scale: how much larger they are.
    """

    label: str
    calls: tuple[Inputs, ...]
    scale: float = 1.0


def neighbours(calls: Sequence[Inputs]) -> Iterator[list[Neighbour]]:
    """Yield what to try, the cheapest first: of each list the first that the model takes.

    Rows of a graph are no batch: nothing is made of graphs.
    """
    rows = [rows_of(_arguments(call)) for call in calls]
    if not calls or not all(rows) or any(map(_is_graph, calls)):
        return
    if min(rows) > 1:
        yield [_with_rows(calls, [max(1, count // _FACTORS[0]) for count in rows])]
    if len(calls) == 1:
        yield _shorter(calls[0])
    yield [neighbour for channels_last in (True, False) for neighbour in _laid_out(calls, channels_last)]
    yield [_with_rows(calls, [factor * count for count in rows]) for factor in _FACTORS]


def _is_graph(call: Inputs) -> bool:
    """Say whether a call has edges; a mask over a batch of two looks like those of two nodes."""
    rows = rows_of(_arguments(call))
    return rows > _MASKED and any(is_of_edges(leaf, rows) for leaf in leaves_of(_arguments(call)))


def _arguments(call: Inputs) -> Arguments:
    return call.args, call.kwargs


def _with_rows(calls: Sequence[Inputs], rows: Sequence[int]) -> Neighbour:
    made, scale = list[Inputs](), 1.0
    for call, count in zip(calls, rows, strict=True):
        old = rows_of(_arguments(call))
        made.append(_inputs(resized(_arguments(call), {0: {old: count}})))
        scale = count / old
    several = "" if len(set(rows)) == 1 else " and others"
    return Neighbour(f"batch {rows[0]}{several}", tuple(made), scale)


def _shorter(call: Inputs) -> list[Neighbour]:
    """Return calls of half the length, or half the height and width; which dimension is a length the model knows."""
    made: list[Neighbour] = []
    for inner in inner_sizes(_arguments(call)):
        if not inner or min(inner) < _SHORTEST:
            continue
        sizes = {size: size // 2 for size in inner}
        halved = _inputs(resized(_arguments(call), dict.fromkeys(range(1, 6), sizes)))
        label = " x ".join(str(sizes[size]) for size in inner)
        made.append(Neighbour(label if len(inner) > 1 else f"length {label}", (halved,), 0.5 ** len(inner)))
    return made


def _laid_out(calls: Sequence[Inputs], channels_last: bool) -> Iterator[Neighbour]:
    """Yield the calls with all images laid out in one way, where some come in the other one."""
    changed: list[Tensor] = []

    def lay_out(tensor: Tensor) -> Tensor:
        if not _is_image(tensor):
            return tensor
        form = _LAST[tensor.dim()] if channels_last else torch.contiguous_format
        if not tensor.is_contiguous(memory_format=form):
            changed.append(tensor)
        return tensor.detach().contiguous(memory_format=form)

    made = tuple(_inputs(map_tensors(lay_out, _arguments(call))) for call in calls)
    if changed:
        yield Neighbour("channels last" if channels_last else "contiguous", made)


def _is_image(tensor: Tensor) -> bool:
    """Say whether a tensor looks like images or volumes, whose two layouts differ."""
    if tensor.layout is not torch.strided or tensor.dim() not in _LAST or not tensor.dtype.is_floating_point:
        return False
    return tensor.shape[1] > 1 and tensor[0, 0].numel() > 1


def _inputs(arguments: Arguments) -> Inputs:
    args, kwargs = arguments
    return Inputs(*args, **kwargs)

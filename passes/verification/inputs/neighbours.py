"""Calls beside the example, to be timed: other batches, lengths, resolutions and layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....operators import CHANNELS_LAST
from ....runtime.values import Arguments, map_tensors
from ....tracing.examples import Inputs
from .sizes import inner_sizes, is_of_edges, leaves_of, resized, rows_of

__all__ = ["Neighbour", "neighbours"]

_FACTORS = (4, 2)
"""Batches are taken so many times as large: the larger one first, the other where that takes too long."""

_MASKED = 2
"""A mask over a batch of two looks like the edges of two nodes."""

_SHORTEST = 8
"""Nothing shorter is halved."""


@dataclass(frozen=True)
class Neighbour:
    """Calls of another size or layout than the recorded ones."""

    label: str  # what is other, for the report
    calls: tuple[Inputs, ...]  # as many as were recorded
    scale: float = 1.0  # how much larger they are


def neighbours(calls: Sequence[Inputs]) -> Iterator[list[Neighbour]]:
    """Yield what to try, the cheapest first: of each list the first that the model takes. Rows of a graph are no
    batch: nothing is made of graphs.
    """
    given = [(call.args, call.kwargs) for call in calls]
    rows = list(map(rows_of, given))
    if not calls or not all(rows) or any(map(_is_graph, given)):
        return
    if min(rows) > 1:
        yield [_with_rows(given, [max(1, count // _FACTORS[0]) for count in rows])]
    if len(calls) == 1:
        yield _shorter(given[0])
    yield [neighbour for channels_last in (True, False) for neighbour in _laid_out(given, channels_last)]
    yield [_with_rows(given, [factor * count for count in rows]) for factor in _FACTORS]


def _is_graph(call: Arguments) -> bool:
    rows = rows_of(call)
    return rows > _MASKED and any(is_of_edges(leaf, rows) for leaf in leaves_of(call))


def _with_rows(calls: Sequence[Arguments], rows: Sequence[int]) -> Neighbour:
    made = [resized(call, {0: {rows_of(call): count}}) for call, count in zip(calls, rows, strict=True)]
    several = "" if len(set(rows)) == 1 else " and others"
    return _neighbour(f"batch {rows[0]}{several}", made, rows[-1] / rows_of(calls[-1]))


def _shorter(call: Arguments) -> list[Neighbour]:
    """Return calls of half the length, or half the height and width; which dimension is a length the model knows."""
    made: list[Neighbour] = []
    for inner in inner_sizes(call):
        if inner and min(inner) >= _SHORTEST:
            sizes = {size: size // 2 for size in inner}
            halved, label = resized(call, dict.fromkeys(range(1, 6), sizes)), " x ".join(str(sizes[n]) for n in inner)
            made.append(_neighbour(label if len(inner) > 1 else f"length {label}", [halved], 0.5 ** len(inner)))
    return made


def _laid_out(calls: Sequence[Arguments], channels_last: bool) -> Iterator[Neighbour]:
    """Yield the calls with all images laid out in one way, where some come in the other one."""
    changed: list[Tensor] = []

    def lay_out(tensor: Tensor) -> Tensor:
        if not _is_image(tensor):
            return tensor
        form = CHANNELS_LAST[tensor.dim()] if channels_last else torch.contiguous_format
        if not tensor.is_contiguous(memory_format=form):
            changed.append(tensor)
        return tensor.detach().contiguous(memory_format=form)

    made = [map_tensors(lay_out, call, within=Tensor.detach) for call in calls]  # what a cache holds are no images
    if changed:
        yield _neighbour("channels last" if channels_last else "contiguous", made)


def _is_image(tensor: Tensor) -> bool:
    """Say whether a tensor looks like images or volumes, whose two layouts differ."""
    if tensor.layout is not torch.strided or tensor.dim() not in CHANNELS_LAST or not tensor.dtype.is_floating_point:
        return False
    return tensor.shape[1] > 1 and tensor[0, 0].numel() > 1


def _neighbour(label: str, calls: Sequence[Arguments], scale: float = 1.0) -> Neighbour:
    return Neighbour(label, tuple(Inputs(*args, **kwargs) for args, kwargs in calls), scale)

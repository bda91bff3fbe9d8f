"""Rows to train on, from a tensor or a loader, in blocks of steps: `[steps, rows of a step, width]`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from ...errors import InputError, UsageError, expect, positive_integer
from .checks import check_values, rows_of_width
from .units import VisibleUnits

__all__ = ["Blocks", "Data", "blocks_of", "rows_in"]

Data: TypeAlias = Tensor | Iterable[Any]
"""Rows [rows, width], or what gives batches of them each time that it is iterated over, such as a `DataLoader`."""

_BATCH_SIZE = 32
_NUMBERS_OF_A_BLOCK = 2**15
"""What is shuffled, and drawn noise for, at once: it stays in a processor's cache."""


class Blocks(Protocol):
    """Data as training takes it."""

    @property
    def steps(self) -> int | None:
        """How many steps an epoch has, where that is known."""
        ...

    def epoch(self, generator: torch.Generator | None) -> Iterator[Tensor]:
        """Give the data once, in blocks [steps, rows, width]."""
        ...


def blocks_of(data: Data, batch_size: int | None, like: Tensor, units: VisibleUnits) -> Blocks:
    """Return data in blocks, with the device, dtype and width of `like`, [..., width].
    Raises an InputError for values that the visible units do not take, a UsageError for another width or no data.
    """
    if isinstance(data, Tensor):
        size = _BATCH_SIZE if batch_size is None else positive_integer(batch_size, "batch_size")
        return _Rows(_matrix(data, like, units, "the data"), size)
    expect(data, Iterable, "data", "a tensor [rows, width], or a DataLoader")
    if batch_size is not None:
        raise UsageError("batch_size is for a tensor; a loader has its own: leave the option out")
    return _Loader(data, like, units)


def rows_in(batch: Any) -> Any:
    """Return the rows of a batch: the first of what it holds where it is a tuple or a list."""
    return cast("Sequence[Any]", batch)[0] if isinstance(batch, list | tuple) and batch else cast("Any", batch)


def _matrix(rows: Any, like: Tensor, units: VisibleUnits, what: str) -> Tensor:
    rows = rows_of_width(rows, like.shape[-1], like.dtype)
    if rows.dim() != 2:
        raise UsageError(f"{what} must be a matrix [rows, {like.shape[-1]}], and has the shape {list(rows.shape)}")
    check_values(rows, units, what)
    return rows.detach().to(like.device, like.dtype)


class _Rows:
    """The rows of a tensor, in another order in each epoch."""

    def __init__(self, rows: Tensor, batch_size: int) -> None:
        self._rows, self._batch_size = rows, min(batch_size, len(rows))
        self.steps: int | None = -(-len(rows) // self._batch_size)

    def epoch(self, generator: torch.Generator | None) -> Iterator[Tensor]:
        order = torch.randperm(len(self._rows), generator=generator, device=self._rows.device)
        size, width = self._batch_size, self._rows.shape[1]
        steps = max(1, _NUMBERS_OF_A_BLOCK // (size * width))
        whole = len(order) // size * size
        for start in range(0, whole, steps * size):
            yield self._rows[order[start : min(start + steps * size, whole)]].view(-1, size, width)
        if whole < len(order):
            yield self._rows[order[whole:]][None]


class _Loader:
    """The batches of a loader, each a block of one step."""

    def __init__(self, loader: Iterable[Any], like: Tensor, units: VisibleUnits) -> None:
        self._loader, self._like, self._units = loader, like, units
        self.steps = _length(loader)

    def epoch(self, generator: torch.Generator | None) -> Iterator[Tensor]:
        nothing = True
        for batch in self._loader:
            yield _matrix(rows_in(batch), self._like, self._units, "a batch")[None]
            nothing = False
        if nothing:
            raise InputError(
                "the loader gives no batches; an iterator that runs once only is empty after the first epoch"
            )


def _length(loader: Any) -> int | None:
    """Return how many batches there are; what only comes in a stream does not know."""
    try:
        return len(loader)
    except TypeError:
        return None

"""Weights in the form that a kernel reads, made from plain tensors when they are needed and kept until these change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...operators import Unchanged
from ...runtime.values import Cache

__all__ = ["Packing"]


class Packing(Cache):
    """Keep what a function makes of tensors as long as these are the same, unchanged.

    It is in no state dict; copies and pickles begin without it. What counts as a change, `Unchanged` says: of writes
    that torch does not count, those of fused optimizers among them, it sees most. Whoever has one forgets after a
    backward, and where the mode is set. Threads may call it at the same time.
    """

    def __init__(self) -> None:
        self._kept: tuple[Unchanged, Any] | None = None

    def of(self, make: Callable[..., Any], *tensors: Tensor | None) -> Any:
        """Return `make(*tensors)`, or what it made of the same tensors before: always of so many."""
        kept = self._kept
        if kept is not None and kept[0].same(*tensors):
            return kept[1]
        noted = Unchanged(tensors)
        made = make(*tensors)
        self._kept = (noted, made)  # at once: another thread sees the old pair or the new one
        return made

    def forget(self) -> None:
        """Let it be made anew: something may have been written that torch does not count."""
        self._kept = None

    @property
    def made(self) -> Any:
        """Return what was made last; None if nothing is kept."""
        return None if self._kept is None else self._kept[1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Packing)  # what is kept follows from the tensors beside it

    def __hash__(self) -> int:
        return hash(Packing)

    def __reduce__(self) -> tuple[Any, ...]:
        return Packing, ()

"""Weights in the form that a kernel reads, made from plain tensors when they are needed and kept until these change."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...compat import version_of
from ...tracing.recording import Cache

__all__ = ["Packing"]


class Packing(Cache):
    """Keep what a function makes of tensors as long as these are the same, unchanged.

    It is in no state dict; copies and pickles begin without it. A tensor counts as changed when it is another object,
    was written to in place, or has other memory; writes that torch does not count, those of fused optimizers among
    them, are not seen: whoever has one forgets after a backward, and where the mode is set. Threads may call it at the
    same time.
    """

    def __init__(self) -> None:
        self._kept: tuple[tuple[Any, ...], Any] | None = None

    def of(self, make: Callable[..., Any], *tensors: Tensor | None) -> Any:
        """Return `make(*tensors)`, or what it made of the same tensors before."""
        kept = self._kept
        if kept is not None and _same(kept[0], tensors):
            return kept[1]
        noted = tuple(None if tensor is None else _noted(tensor) for tensor in tensors)
        made = make(*tensors)
        self._kept = (noted, made)  # at once: another thread sees the old pair or the new one
        return made

    def forget(self) -> None:
        """Let it be made anew: something may have been written that torch does not count."""
        self._kept = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that the function was last called with, as far as they still exist."""
        return () if self._kept is None else tuple(None if known is None else known[0]() for known in self._kept[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Packing)  # what is kept follows from the tensors beside it

    def __hash__(self) -> int:
        return hash(Packing)

    def __reduce__(self) -> tuple[Any, ...]:
        return Packing, ()


def _noted(tensor: Tensor) -> tuple[Any, ...]:
    # Its memory is held: nothing else may come to lie in that place.
    return weakref.ref(tensor), _version(tensor), tensor.data_ptr(), tensor.detach()


def _same(noted: tuple[Any, ...], tensors: tuple[Tensor | None, ...]) -> bool:
    for known, tensor in zip(noted, tensors, strict=True):
        if tensor is None or known is None:
            if tensor is not known:
                return False
        elif known[0]() is not tensor or known[1] != _version(tensor) or known[2] != tensor.data_ptr():
            return False
    return True


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)  # those of inference mode have none

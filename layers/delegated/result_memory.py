"""Memory for large results of an engine: it is written to again once nobody holds what was given out."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["ResultMemory", "is_large"]

_LARGE = 1 << 20
"""Bytes of results that are worth it: to copy less takes less time than to keep account."""

_MOST = 2
"""So many sets of results are kept: who calls in a loop holds one while the next is computed."""


def is_large(results: Sequence[Tensor]) -> bool:
    """Say whether results are worth memory that is written to directly."""
    return sum(each.nbytes for each in results) >= _LARGE


@dataclass
class _Lent:
    """Memory of a result, and who holds it: the array that the storage of the result given out is made of."""

    memory: Tensor
    holder: Any = None

    @property
    def is_free(self) -> bool:
        return self.holder is None or self.holder() is None

    def lend(self) -> Tensor:
        array: Any = cast("Any", self.memory).numpy()
        self.holder = weakref.ref(array)
        return torch.from_numpy(array)  # its storage keeps the array, and so does whatever shares the storage


@dataclass
class ResultMemory:
    """Memory for results of certain shapes and types, for one thread."""

    forms: Sequence[tuple[torch.Size, torch.dtype]]
    _kept: list[list[_Lent]] = field(default_factory=list[list[_Lent]])

    def lend(self) -> list[Tensor]:
        """Return tensors for results, in memory that nobody else holds."""
        for each in self._kept:
            if all(one.is_free for one in each):
                return [one.lend() for one in each]
        new = [_Lent(torch.empty(shape, dtype=dtype)) for shape, dtype in self.forms]
        if len(self._kept) < _MOST:
            self._kept.append(new)
        return [one.lend() for one in new]

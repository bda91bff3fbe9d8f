"""Small work beside an engine, in one thread: threads of OpenMP keep their processors for milliseconds after it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ...compat import runs_kernels

__all__ = ["LookUp", "OneThread", "numbers_of"]

_MOST = 1 << 20
"""Of so many numbers work is small: one thread writes 4 MiB in less time than the others would wait for more."""


@cache
def _set_threads() -> Callable[[int], None] | None:
    """Return OpenMP's function for the calling thread alone, where torch computes by OpenMP.

    `torch.set_num_threads` is none for each call: it speaks to other libraries, too, and empties caches of kernels.
    """
    try:
        return ctypes.PyDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):
        return None


class OneThread:
    """Let torch compute in the calling thread alone; elsewhere, and after it, as before.

    After a computation in several threads those of OpenMP wait actively for the next one. The engine's threads need
    the same processors, and a look-up of 64 rows took 9 ms of processor time in two threads, 0.2 ms in one. `numbers`
    says how many are computed: where these are many, several threads are worth that.
    """

    def __init__(self, numbers: int) -> None:
        self._threads = torch.get_num_threads() if numbers <= _MOST else 1
        self._set = _set_threads() if self._threads > 1 else None

    def __enter__(self) -> None:
        if self._set is not None:
            self._set(1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._set is not None:
            self._set(self._threads)


def numbers_of(values: Sequence[Any]) -> int:
    """Return how many numbers tensors have; what is none, as an input of a region may be, has none."""
    return sum(each.numel() for each in values if isinstance(each, Tensor))


@dataclass(frozen=True)
class LookUp:
    """Look rows up as `torch.nn.functional.embedding` does, few rows in one thread."""

    operator: ClassVar[str] = "embedding"
    __name__ = "look_up"

    def __call__(self, indices: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not runs_kernels():
            return functional.embedding(indices, weight, *args, **kwargs)
        with OneThread(indices.numel() * weight.shape[-1]):
            return functional.embedding(indices, weight, *args, **kwargs)

"""What is computed from a graph is kept while the tensors that say it are the same, and unchanged."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...operators import Unchanged
from .sights import Sights

__all__ = ["KeptGraphs"]

_MOST = 32
"""So many results are kept at most: some for each of several graphs that take turns."""

_Key = tuple[Hashable, ...]


@dataclass(frozen=True)
class _Kept:
    """A result, and the tensors that it was computed from, as they were."""

    tensors: tuple[Callable[[], Tensor | None], ...]
    noted: Unchanged
    contents: tuple[Tensor | None, ...]
    """Copies of those among them that torch counts no writes to."""
    result: Any
    may_be_trained: bool
    """It follows from numbers that an optimizer may write to."""

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether it was computed from these tensors with these numbers."""
        return self.noted.same(*tensors) and _hold(tensors, self.contents)


class KeptGraphs:
    """Results by the tensors that they were computed from: the same object, never written to since.

    Threads may share it. A copy of it, or one from a pickle, is empty.

    Attributes:
        sights: layer, by its identity, and its mode -> what it knows of its graphs. A layer on one graph says nothing
            of one behind it whose graphs are always new, nor evaluation on one graph of training on many.
    """

    def __init__(self) -> None:
        self.sights: dict[tuple[int, bool], Sights] = {}
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()

    def __reduce__(self) -> tuple[type[KeptGraphs], tuple[()]]:
        return KeptGraphs, ()

    def of(self, tensors: Sequence[Tensor], what: Hashable, compute: Callable[[], Any]) -> Any:
        """Return what was computed from some tensors; it is computed where they are others, or were written to.

        Args:
            tensors: what it depends on; they are held weakly. Those of inference mode have no version: a copy of each
                is kept, and compared at each call.
            what: the rest that it depends on.
            compute: makes it.
        """
        key = _key(tensors, what)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
        if kept is not None and kept.is_of(tensors):  # no lock: to compare many edges takes a while
            return kept.result
        kept = self._computed(key, tensors, compute)
        if kept.is_of(tensors):  # else another thread wrote to them meanwhile
            with self._lock:
                self._kept[key] = kept
                self._kept.move_to_end(key)
                while len(self._kept) > _MOST:
                    self._kept.popitem(last=False)
        return kept.result

    def _computed(self, key: _Key, tensors: Sequence[Tensor], compute: Callable[[], Any]) -> _Kept:
        noted = Unchanged(tensors)
        contents = tuple(each.clone() if each.is_inference() else None for each in tensors)
        forget = _forgetting(weakref.ref(self), key)
        trained = any(each.is_floating_point() for each in tensors)
        return _Kept(tuple(weakref.ref(each, forget) for each in tensors), noted, contents, compute(), trained)

    def forget_trained(self) -> None:
        """Drop what was computed from floats: torch does not count what fused optimizers write."""
        with self._lock:
            for key in [key for key, kept in self._kept.items() if kept.may_be_trained]:
                self._kept.pop(key, None)

    def forget(self, key: _Key, gone: object) -> None:
        """Drop a result when a tensor that it was computed from is gone; not one that has taken its place."""
        kept = self._kept.get(key)  # no lock: this may run in the midst of anything, in a thread that holds it
        if kept is not None and any(known is gone for known in kept.tensors):
            self._kept.pop(key, None)


def _forgetting(kept: Callable[[], KeptGraphs | None], key: _Key) -> Callable[[object], None]:
    def forget(gone: object) -> None:
        graphs = kept()
        if graphs is not None:
            graphs.forget(key, gone)

    return forget


def _hold(tensors: Sequence[Tensor], contents: Sequence[Tensor | None]) -> bool:
    """Say whether tensors hold the numbers of these copies, where there are any."""
    return all(copy is None or torch.equal(each, copy) for each, copy in zip(tensors, contents, strict=True))


def _key(tensors: Sequence[Tensor], what: Hashable) -> _Key:
    return (what, *map(id, tensors))

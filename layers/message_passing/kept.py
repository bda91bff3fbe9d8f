"""What is computed from a graph is kept while the tensors that say it are the same, and unchanged."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...compat import version_of

__all__ = ["KeptGraphs"]

_MOST = 32
"""So many results are kept at most: some for each of several graphs that take turns."""

_Key = tuple[Hashable, ...]
_State = tuple[int, int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class _Kept:
    """A result, and which tensors in which state it was computed from."""

    tensors: tuple[Callable[[], Tensor | None], ...]
    states: tuple[_State, ...]
    result: Any
    memory: tuple[Tensor, ...]
    """Nothing else may come to lie in its place: a tensor could be given that later."""

    @property
    def may_be_trained(self) -> bool:
        """Say whether it follows from numbers that an optimizer may write to."""
        return any(each.is_floating_point() for each in self.memory)

    def is_of(self, tensors: Sequence[Tensor], states: Sequence[_State]) -> bool:
        return all(known() is now for known, now in zip(self.tensors, tensors, strict=True)) and self.states == states


class KeptGraphs:
    """Results by the tensors that they were computed from: the same object, never written to since.

    Threads may share it. A copy of it, or one from a pickle, is empty.

    Attributes:
        trials: layer, by its identity -> for how many graphs it made rows, since one came again, that would not have
            been worth it alone. A layer on one graph says nothing of one behind it whose graphs are always new.
    """

    def __init__(self) -> None:
        self.trials: dict[int, int] = {}
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()

    def __reduce__(self) -> tuple[type[KeptGraphs], tuple[()]]:
        return KeptGraphs, ()

    def holds(self, tensors: Sequence[Tensor], what: Hashable) -> bool:
        """Say whether something was computed from these tensors as they are."""
        states = _states(tensors)
        kept = None if states is None else self._kept.get(_key(tensors, what))
        return kept is not None and kept.is_of(tensors, states or ())

    def of(self, tensors: Sequence[Tensor], what: Hashable, compute: Callable[[], Any]) -> Any:
        """Return what was computed from some tensors; it is computed where they are others, or were written to.

        Args:
            tensors: what it depends on; they are held weakly. Of tensors without a version, those of inference mode,
                nothing is kept.
            what: the rest that it depends on.
            compute: makes it.
        """
        states = _states(tensors)
        if states is None:
            return compute()
        key = _key(tensors, what)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and kept.is_of(tensors, states):
                self._kept.move_to_end(key)
                return kept.result
        memory = tuple(each.detach() for each in tensors)
        result = compute()
        if _states(tensors) != states:  # another thread wrote to them meanwhile
            return result
        forget = _forgetting(weakref.ref(self), key)
        with self._lock:
            self._kept[key] = _Kept(tuple(weakref.ref(each, forget) for each in tensors), states, result, memory)
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST:
                self._kept.popitem(last=False)
        return result

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


def _key(tensors: Sequence[Tensor], what: Hashable) -> _Key:
    return (what, *map(id, tensors))


def _states(tensors: Sequence[Tensor]) -> tuple[_State, ...] | None:
    """Return what tells whether tensors were written to, or given other memory; None where nothing does."""
    if any(each.is_inference() for each in tensors):
        return None
    return tuple((version_of(each), each.data_ptr(), tuple(each.shape), each.stride()) for each in tensors)

"""What is computed from a graph is kept while the tensors that say it are the same, and unchanged."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from ...operators import Cache, Unchanged
from .sights import Sights

__all__ = ["KeptGraphs"]

_MOST = 32
"""So many results are kept at most: some for each of several graphs that take turns."""


class KeptGraphs(Cache):
    """Results by the tensors that they were computed from, which are held weakly.
    `sights`: by a layer's identity and mode, what it knows of its graphs; layers and modes differ in what repeats.
    """

    compares_whole: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.sights: dict[tuple[int, bool], Sights] = {}
        self._lock = threading.Lock()
        self._kept = self._ordered = OrderedDict[Hashable, tuple[Any, ...]]()

    def of(self, make: Callable[..., Any], *tensors: Tensor | None, key: Hashable = None) -> Any:
        """Return `make(*tensors)`, or what was made of these tensors before; `key` is what it depends on besides."""
        full = (key, *map(id, tensors))
        made = super().of(make, *tensors, key=full)
        with self._lock:
            if full in self._ordered:
                self._ordered.move_to_end(full)
        return made

    def _keep(self, key: Hashable, noted: Unchanged, tensors: Sequence[Tensor | None], made: Any) -> None:
        if not noted.same(*tensors):  # another thread wrote to them meanwhile
            return
        forget = _forgetting(weakref.ref(self), key)
        with self._lock:
            self._kept[key] = noted, made, [weakref.ref(each, forget) for each in tensors if each is not None]
            while len(self._kept) > _MOST:
                self._ordered.popitem(last=False)

    def forget_trained(self) -> None:
        """Drop what was computed from floats: torch does not count what fused optimizers write."""
        with self._lock:
            for key in [key for key, kept in self._kept.items() if kept[0].holds_floats]:
                self._kept.pop(key, None)

    def forget_gone(self, key: Hashable, gone: object) -> None:
        """Drop a result when a tensor that it was computed from is gone; not one that has taken its place."""
        kept = self._kept.get(key)  # no lock: this may run in the midst of anything, in a thread that holds it
        if kept is not None and any(known is gone for known in kept[2]):
            self._kept.pop(key, None)


def _forgetting(kept: Callable[[], KeptGraphs | None], key: Hashable) -> Callable[[object], None]:
    def forget(gone: object) -> None:
        graphs = kept()
        if graphs is not None:
            graphs.forget_gone(key, gone)

    return forget

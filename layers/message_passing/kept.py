"""What is computed from a graph is kept while the tensors that say it are the same, and unchanged."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from torch import Tensor

from ...compat import version_of
from ...operators import Cache, Unchanged
from .rows import Rows

__all__ = ["KeptGraphs", "Sights", "is_small", "most_edges", "noted"]


_WORTH = 2**19
"""Rows are made at the first sight of a graph whose messages are this many numbers: they take less than is gained."""

_COST = 3
"""To make the rows of a small graph takes as long as so many calls over them gain."""

_CREDIT = 4
"""So many graphs may go over rows before the layer waits longer."""

_PAID = 16
"""A graph whose rows were used again so often shows that graphs come again: rows are made at the first sight."""

_MOST_SEEN = 64
"""So many graphs are remembered at most."""

_NEW_IN_A_ROW, _UNOBSERVED = 64, 31
"""After so many graphs in a row that were new, so many are not looked at: who stands aside must cost nothing."""

_Seen = tuple[weakref.ref[Tensor], int, int]
"""A graph, its version, and how often it was seen at that."""


def is_small(x: Tensor, edge_index: Tensor) -> bool:
    """Say whether making the rows of a graph, for features x [n, in], takes longer than one call over them gains."""
    return edge_index.numel() * x.shape[-1] < 2 * _WORTH


@dataclass
class Sights:
    """What one layer knows of the graphs that it was called with.
    At sight number `wanted` of a graph its rows are made; it doubles when the `debt`, in calls, grows: rows cost more
    than they gained.
    """

    wanted: int = 1
    debt: int = 0
    new_in_a_row: int = 0
    _seen: dict[int, tuple[weakref.ref[Tensor], int, int]] = field(
        default_factory=dict[int, tuple[weakref.ref[Tensor], int, int]]
    )

    def wants(self, edge_index: Tensor) -> bool:
        """Note a sight of a graph, and say whether it goes over rows: it came often enough since it was written to."""
        if self.wanted == 1:
            return True
        key = id(edge_index)
        version = 0 if edge_index.is_inference() else version_of(edge_index)  # what it holds is compared over rows
        noted = self._seen.get(key)  # no lock: it would cost as much again, and a count that threads lose is no loss
        if noted is not None and noted[0]() is edge_index and noted[1] == version:
            self._seen[key], self.new_in_a_row = (noted[0], version, noted[2] + 1), 0
            return noted[2] + 1 >= self.wanted
        if len(self._seen) >= _MOST_SEEN:
            self._forget()
        self._seen[key] = weakref.ref(edge_index), version, 1
        self.new_in_a_row += 1
        return False

    @property
    def calls_unobserved(self) -> int:
        """How many calls on small graphs need not be looked at: none while graphs come again."""
        return _UNOBSERVED if self.new_in_a_row > _NEW_IN_A_ROW else 0

    def _forget(self) -> None:
        """Forget the graphs that are gone; all where that leaves no room."""
        alive = {each: seen for each, seen in list(self._seen.items()) if seen[0]() is not None}
        self._seen = alive if len(alive) < _MOST_SEEN else {}

    def used(self, layer: int, rows: Rows) -> None:
        """Note that a layer, by its identity, goes over these rows: what they cost at first, what they gain then."""
        uses = rows.uses.get(layer, 0)
        rows.uses[layer] = uses + 1
        self.debt = self.debt + _COST if not uses else max(0, self.debt - 1)
        if self.debt > _COST * _CREDIT:
            self.wanted, self.debt = 2 * self.wanted, 0
        elif uses >= _PAID:
            self.wanted = 1


_MOST = 32
"""So many results are kept at most: some for each of several graphs that take turns."""


class KeptGraphs(Cache):
    """Results by the tensors, held weakly, that they come from; `sights` by layer and mode."""

    compares_whole: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.sights: dict[tuple[int, bool], Sights] = {}
        self._lock = threading.Lock()
        self._kept = self._ordered = OrderedDict[Hashable, tuple[Any, ...]]()

    def of(
        self, make: Callable[..., Any], *tensors: Tensor | None, key: Hashable = None, most: int | None = None
    ) -> Any:
        """Return `make(*tensors)`, or what was made of these tensors before; `key` is what it depends on besides."""
        full = (key, *map(id, tensors))
        made = super().of(make, *tensors, key=full, most=most)
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

    def drop(self, key: Hashable, gone: object) -> None:
        """Drop a result when a tensor that it was computed from is gone; not one that has taken its place."""
        kept = self._kept.get(key)  # no lock: this may run in the midst of anything, in a thread that holds it
        if kept is not None and any(known is gone for known in kept[2]):
            self._kept.pop(key, None)


def noted(conv: Any, kept: KeptGraphs, x: Tensor, edge_index: Tensor, rows: Rows | None) -> Rows | None:
    """Note that a layer goes over these rows where it matters how often it does."""
    sights = kept.sights.get((id(conv), conv.training))
    if rows is not None and sights is not None and is_small(x, edge_index):
        sights.used(id(conv), rows)
    return rows


def most_edges(x: Any, edges: Any) -> tuple[Any, Any]:
    """Return the sources and edges of the kind that has most, which stand for all; twice None for other things."""
    if not isinstance(x, dict) or not isinstance(edges, dict) or not edges:
        return None, None
    given = cast("dict[Any, Any]", edges)
    if any(type(each) is not Tensor for each in given.values()):
        return None, None
    kind = max(given, key=lambda kind: given[kind].numel())
    return cast("dict[Any, Any]", x).get(kind[0]), given[kind]


def _forgetting(kept: Callable[[], KeptGraphs | None], key: Hashable) -> Callable[[object], None]:
    def forget(gone: object) -> None:
        graphs = kept()
        if graphs is not None:
            graphs.drop(key, gone)

    return forget

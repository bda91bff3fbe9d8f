"""How often a layer has seen a graph, and from which sight on it makes rows: that costs more than one call gains."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import Tensor

from ...compat import version_of
from .rows import Rows

__all__ = ["Sights", "is_small"]

_WORTH = 2**19
"""Rows are made at the first sight of a graph whose messages are this many numbers: they take less than is gained."""

_COST = 3
"""To make the rows of a small graph takes as long as so many calls over them gain."""

_CREDIT = 4
"""So many graphs may go over rows before the layer waits longer."""

_PAID = 16
"""A graph whose rows were used again so often shows that graphs come again: rows are made at the first sight."""

_MOST = 64
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
        if len(self._seen) >= _MOST:
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
        self._seen = alive if len(alive) < _MOST else {}

    def used(self, layer: int, rows: Rows) -> None:
        """Note that a layer, by its identity, goes over these rows: what they cost at first, what they gain then."""
        uses = rows.uses.get(layer, 0)
        rows.uses[layer] = uses + 1
        self.debt = self.debt + _COST if not uses else max(0, self.debt - 1)
        if self.debt > _COST * _CREDIT:
            self.wanted, self.debt = 2 * self.wanted, 0
        elif uses >= _PAID:
            self.wanted = 1

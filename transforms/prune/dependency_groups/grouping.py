"""Units in groups: those go together into one that the same dimensions mention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .dimension_tracker import DimensionTracker
from .index_classes import FIXED, Array

__all__ = ["Grouping", "grouped"]


@dataclass
class Grouping:
    """The units of a solution, in groups: atom -> the numbers of its unit's group and of the unit in it, or -1; group
    -> the dimensions that have its units, in the order of their use, the one that makes them, and how many there are.
    """

    group: Array
    number: Array
    dimensions: list[list[int]] = field(default_factory=list[list[int]])
    makers: list[int] = field(default_factory=list[int])
    sizes: list[int] = field(default_factory=list[int])

    def of(self, units: Array, group: int) -> tuple[int, ...]:
        """Return the numbers of those of `units` that are in a group, -1 for others."""
        return tuple(np.where(self.group[units] == group, self.number[units], -1).tolist())

    def groups_in(self, units: Array) -> list[int]:
        """Return the groups that have some of these units."""
        found = np.unique(self.group[units])
        return found[found >= 0].tolist()


def grouped(tracker: DimensionTracker, units: Sequence[Array]) -> Grouping:
    """Put units together that are mentioned by the same dimensions; units that are alone in that stay."""
    signatures = np.zeros(tracker.count, dtype=np.uint64)
    for index, each in enumerate(units):
        found, counts = np.unique(each[each != FIXED], return_counts=True)
        factor = np.uint64((2 * index + 1) * 0x9E3779B97F4A7C15 % 2**64)
        signatures[found] += factor * (counts.astype(np.uint64) ** np.uint64(3))
    made = Grouping(np.full(tracker.count, -1, dtype=np.int64), np.full(tracker.count, -1, dtype=np.int64))
    known: dict[int, int] = {}
    for index, each in enumerate(units):
        present = _in_order(each[each != FIXED])
        for signature in dict.fromkeys(signatures[present].tolist()):
            mine = present[signatures[present] == np.uint64(signature)]
            if len(mine) < 2:
                continue
            if signature not in known:
                known[signature] = len(made.dimensions)
                made.dimensions.append([])
                made.group[mine] = known[signature]
            made.dimensions[known[signature]].append(index)
    for group, indices in enumerate(made.dimensions):
        maker = next((i for i in indices if i in tracker.made), indices[0])
        order = _in_order(units[maker][made.group[units[maker]] == group])
        made.number[order] = np.arange(len(order))
        made.makers.append(maker)
        made.sizes.append(len(order))
    return made


def _in_order(units: Array) -> Array:
    """Return each unit once, in the order of first use."""
    return units[np.sort(np.unique(units, return_index=True)[1])]

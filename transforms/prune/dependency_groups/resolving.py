"""From what a run found to groups: which units there are, and everything that mentions them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from torch import nn

from ....tracing.program import Program
from .dimension_tracker import Dimension, DimensionTracker
from .groups import Attribute, Coupling, Cut, Group, Kind, Norm, Number, Refused
from .index_classes import FIXED, Array, Solution
from .requirements import Assigned, Broken, assigned, broken
from .running import RESULT
from .sizes import Requirement, Size, Source
from .widths import widths

__all__ = ["resolved"]

_ONE_UNIT = "all of its units go together"


def _given(requirement: Requirement) -> Source | None:
    """Return where a graph is given a size that it computes: a plain number can stand there."""
    size = requirement.size
    return size.given if isinstance(size, Size) and requirement.count is not None else None


@dataclass
class _Grouping:
    """The units of a solution, in groups.

    Attributes:
        group: atom -> the number of the group that its unit is in, or -1.
        number: atom -> the number of the unit within its group.
        dimensions: group -> the dimensions that have its units, in the order of their use.
    """

    group: Array
    number: Array
    dimensions: list[list[int]] = field(default_factory=list[list[int]])

    def of(self, units: Array, group: int) -> tuple[int, ...]:
        """Return the numbers of those of `units` that are in a group, -1 for others."""
        return tuple(np.where(self.group[units] == group, self.number[units], -1).tolist())

    def groups_in(self, units: Array) -> list[int]:
        """Return the groups that have some of these units."""
        found = np.unique(self.group[units])
        return found[found >= 0].tolist()


def resolved(program: Program, tracker: DimensionTracker) -> Coupling:
    """Return the groups that a run's findings leave."""
    while True:
        solution = tracker.atoms.solve()
        units = [solution.of(dimension.atoms) for dimension in tracker.dimensions]
        grouping = _grouped(tracker, units)
        known = assigned(tracker.requirements, solution)
        wrong = list(broken(tracker.requirements, known, solution, grouping.group))
        fatal = [each for each in wrong if not each.requirement.own and _given(each.requirement) is None]
        if not fatal:
            return _Writer(program, tracker, solution, units, grouping, known, wrong).coupling()
        for each in fatal:
            tracker.atoms.fix(np.flatnonzero(grouping.group == each.group), each.why)


def _grouped(tracker: DimensionTracker, units: Sequence[Array]) -> _Grouping:
    """Put units together that are mentioned by the same dimensions; units that are alone in that stay."""
    signatures = np.zeros(tracker.atoms.count, dtype=np.uint64)
    for index, each in enumerate(units):
        found, counts = np.unique(each[each != FIXED], return_counts=True)
        factor = np.uint64((2 * index + 1) * 0x9E3779B97F4A7C15 % 2**64)
        signatures[found] += factor * (counts.astype(np.uint64) ** np.uint64(3))
    group = np.full(tracker.atoms.count, -1, dtype=np.int64)
    number = np.full(tracker.atoms.count, -1, dtype=np.int64)
    grouping = _Grouping(group, number)
    known: dict[int, int] = {}
    for index, each in enumerate(units):
        present = each[np.sort(np.unique(each, return_index=True)[1])]
        present = present[present != FIXED]
        for signature in dict.fromkeys(signatures[present].tolist()):
            mine = present[signatures[present] == np.uint64(signature)]
            if len(mine) < 2:
                continue
            if signature not in known:
                known[signature] = len(grouping.dimensions)
                grouping.dimensions.append([])
                group[mine] = known[signature]
            grouping.dimensions[known[signature]].append(index)
    for which, indices in enumerate(grouping.dimensions):
        maker = next((i for i in indices if i in tracker.made), indices[0])
        mine = units[maker][group[units[maker]] == which]
        order = mine[np.sort(np.unique(mine, return_index=True)[1])]
        number[order] = np.arange(len(order))
    return grouping


class _Writer:
    """Write groups down as plain values."""

    def __init__(
        self, program: Program, tracker: DimensionTracker, solution: Solution, units: Sequence[Array],
        grouping: _Grouping, known: Assigned, wrong: Sequence[Broken],
    ) -> None:  # fmt: skip
        self._program = program
        self._tracker = tracker
        self._solution = solution
        self._units = units
        self._grouping = grouping
        self._known = known
        self._wrong = wrong

    def coupling(self) -> Coupling:
        """Return all groups and refusals."""
        count = len(self._grouping.dimensions)
        numbers, attributes = self._sizes(count)
        norms = self._norms(count)
        order = sorted(range(count), key=self._maker)
        names = self._names(order)
        groups = [
            Group(
                names[group], self._kind(group), self._size(group), self._cuts(group), tuple(numbers[group]),
                tuple(attributes[group]), tuple(norms[group]), self._replaced(group), self._hard_coded(group),
            )
            for group in order
        ]  # fmt: skip
        return Coupling(tuple(groups), tuple(self._refused()))

    def _maker(self, group: int) -> int:
        indices = self._grouping.dimensions[group]
        return next((i for i in indices if i in self._tracker.made), indices[0])

    def _names(self, order: Sequence[int]) -> dict[int, str]:
        """Return the names of the layers that make units; parts of one layer by the range of their indices."""
        makers = {group: self._tracker.dimensions[self._maker(group)] for group in order}
        names = {group: _layer(maker) for group, maker in makers.items()}
        for group in _repeated(names):
            names[group] = makers[group].tensor
        for group in _repeated(names):
            where = np.flatnonzero(self._grouping.group[self._units[self._maker(group)]] == group)
            names[group] += f"[{where[0]}:{where[-1] + 1}]"
        for group in _repeated(names)[1:]:
            names[group] += f"#{group}"
        return names

    def _size(self, group: int) -> int:
        units = self._units[self._maker(group)]
        return len(np.unique(units[self._grouping.group[units] == group]))

    def _kind(self, group: int) -> Kind:
        if any(group in self._groups_of(block) for block in self._tracker.heads):
            return "heads"
        dimension = self._tracker.dimensions[self._maker(group)]
        module = self._program.module(_layer(dimension))
        return "channels" if isinstance(module, nn.modules.conv._ConvNd) else "hidden"  # pyright: ignore[reportPrivateUsage]

    def _cuts(self, group: int) -> tuple[Cut, ...]:
        dimensions = self._tracker.dimensions
        found = [(dimensions[index], self._units[index]) for index in self._grouping.dimensions[group]]
        return tuple(Cut(each.tensor, each.dim, self._grouping.of(units, group)) for each, units in found)

    def _sizes(self, count: int) -> tuple[list[list[Number]], list[list[Attribute]]]:
        numbers: list[list[Number]] = [[] for _ in range(count)]
        attributes: list[list[Attribute]] = [[] for _ in range(count)]
        seen: set[tuple[str, str, int | None]] = set()
        for source, (value, units) in self._known.items():
            for group in self._grouping.groups_in(units):
                of = self._grouping.of(units, group)
                if source.is_attribute:
                    index = cast("int | None", source.path[0] if source.path else None)
                    seen.add((source.owner, source.name, index))
                    attributes[group].append(Attribute(source.owner, source.name, index, of))
                else:
                    numbers[group].append(
                        Number(source.owner, source.specialization, source.name, source.path, value, of)
                    )
        for each in self._wrong:
            source = None if each.requirement.own else _given(each.requirement)
            if source is not None and each.requirement.count is not None:
                of = self._grouping.of(each.requirement.count.units(self._solution), each.group)
                numbers[each.group].append(
                    Number(source.owner, source.specialization, source.name, source.path, len(of), of, computed=True)
                )
        for name, width in self._widths():
            if (name, width.name, width.index) not in seen:
                for group in self._grouping.groups_in(width.units):
                    of = self._grouping.of(width.units, group)
                    attributes[group].append(Attribute(name, width.name, width.index, of))
        return numbers, attributes

    def _widths(self) -> Iterator[tuple[str, Any]]:
        dimensions = self._tracker.dimensions
        units = {(each.tensor, each.dim): self._units[index] for index, each in enumerate(dimensions)}
        touched = {each.tensor.rpartition(".")[0] for each in dimensions}
        for name in sorted(touched):
            for width in widths(self._program.module(name), name, units):
                yield name, width

    def _norms(self, count: int) -> list[list[Norm]]:
        norms: list[list[Norm]] = [[] for _ in range(count)]
        for each in self._tracker.statistics:
            units = each.count.units(self._solution)
            for group in self._grouping.groups_in(units):
                place = each.place
                norm = Norm(
                    place.module, cast("Any", each.kind), place.owner, place.specialization, place.node,
                    self._grouping.of(units, group),
                )  # fmt: skip
                if norm not in norms[group]:
                    norms[group].append(norm)
        return norms

    def _replaced(self, group: int) -> tuple[str, ...]:
        found = [name for name, atoms in self._tracker.replaced if group in self._groups_of(atoms)]
        return tuple(dict.fromkeys(found))

    def _groups_of(self, atoms: Array) -> list[int]:
        return self._grouping.groups_in(self._solution.of(atoms))

    def _hard_coded(self, group: int) -> tuple[tuple[str, str], ...]:
        wrong = [each for each in self._wrong if each.group == group and each.requirement.own]
        found = [(each.requirement.module, each.why) for each in wrong]
        return tuple(dict(reversed(found)).items())

    def _refused(self) -> Iterator[Refused]:
        for index in sorted(self._tracker.made):
            dimension, units = self._tracker.dimensions[index], self._units[index]
            if (self._grouping.group[units] >= 0).any():
                continue
            reason = int(self._solution.fixed[dimension.atoms[0]])
            why = self._solution.reasons[reason] if reason >= 0 else _ONE_UNIT
            yield Refused(_layer(dimension), why, by_design=why == RESULT)


def _repeated(names: Mapping[int, str]) -> list[int]:
    """Return the groups whose name another one has too."""
    counts = Counter(names.values())
    return [group for group, name in names.items() if counts[name] > 1]


def _layer(dimension: Dimension) -> str:
    return dimension.tensor.rpartition(".")[0]

"""Groups of units, and as plain values everything that mentions them, with their names in the model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from torch import nn

from ....runtime.values import qualified
from ....tracing.program import Program
from .dimension_tracker import Dimension, DimensionTracker
from .groups import Attribute, Coupling, Cut, Group, Kind, Norm, Number, Refused
from .labels import FIXED, Array, Solution
from .running import RESULT
from .sizes import Assigned, Broken, Requirement, Size, Source

__all__ = ["Grouping", "Writer", "given_in_graph", "grouped"]


@dataclass
class Grouping:
    """The units of a solution, in groups."""

    group: Array  # atom -> the number of its unit's group, or -1
    number: Array  # atom -> the number of its unit in the group, or -1
    dimensions: list[list[int]] = field(default_factory=list[list[int]])  # that have a group's units, in order of use
    makers: list[int] = field(default_factory=list[int])  # by group, the dimension that makes its units
    sizes: list[int] = field(default_factory=list[int])

    def of(self, units: Array, group: int) -> tuple[int, ...]:
        """Return the numbers of those of `units` that are in a group, -1 for others."""
        return tuple(np.where(self.group[units] == group, self.number[units], -1).tolist())

    def groups_in(self, units: Array) -> list[int]:
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


_ONE_UNIT = "all of its units go together"


def given_in_graph(requirement: Requirement) -> Source | None:
    """Return where a graph is given a size that it computes: a plain number can stand there."""
    size = requirement.size
    return size.given if isinstance(size, Size) and requirement.count is not None else None


@dataclass(frozen=True)
class Writer:
    """Write down the groups of a run."""

    program: Program
    tracker: DimensionTracker
    solution: Solution
    units: Sequence[Array]  # of each dimension
    grouping: Grouping
    known: Assigned  # what numbers count
    wrong: Sequence[Broken]  # what does not hold once units are gone, where something can be done about that

    def coupling(self) -> Coupling:
        grouping = self.grouping
        numbers, attributes, norms = self._numbers(), self._attributes(), self._norms()
        heads = {group for block in self.tracker.heads for group in self._groups_of(block)}
        order = sorted(range(len(grouping.makers)), key=grouping.makers.__getitem__)
        names = self._names(order)
        groups = [
            Group(
                names[group], "heads" if group in heads else self._kind(group), grouping.sizes[group],
                self._cuts(group), tuple(numbers[group]), tuple(attributes[group]), tuple(dict.fromkeys(norms[group])),
                self._replaced(group), self._hard_coded(group),
            )
            for group in order
        ]  # fmt: skip
        return Coupling(tuple(groups), tuple(self._refused()))

    def _maker(self, group: int) -> Dimension:
        return self.tracker.dimensions[self.grouping.makers[group]]

    def _groups_of(self, atoms: Array) -> list[int]:
        return self.grouping.groups_in(self.solution.of(atoms))

    def _names(self, order: Sequence[int]) -> dict[int, str]:
        """Return the names of the layers that make units; parts of one layer by the range of their indices."""
        names = {group: _layer(self._maker(group)) for group in order}
        for group in _repeated(names):
            names[group] = self._maker(group).tensor
        for group in _repeated(names):
            where = np.flatnonzero(self.grouping.group[self.units[self.grouping.makers[group]]] == group)
            names[group] += f"[{where[0]}:{where[-1] + 1}]"
        for group in _repeated(names)[1:]:
            names[group] += f"#{group}"
        return names

    def _kind(self, group: int) -> Kind:
        module = self.program.module(_layer(self._maker(group)))
        return "channels" if isinstance(module, nn.modules.conv._ConvNd) else "hidden"  # pyright: ignore[reportPrivateUsage]

    def _cuts(self, group: int) -> tuple[Cut, ...]:
        found = [(self.tracker.dimensions[index], self.units[index]) for index in self.grouping.dimensions[group]]
        return tuple(Cut(each.tensor, each.dim, self.grouping.of(units, group)) for each, units in found)

    def _numbers(self) -> dict[int, list[Number]]:
        """Return the sizes in graphs, by group: those that count its units, and those that it has to be told of."""
        numbers: dict[int, list[Number]] = defaultdict(list)
        for source, (_, units) in self.known.items():
            for group in self.grouping.groups_in(units) if not source.is_attribute else ():
                numbers[group].append(_number(source, self.grouping.of(units, group)))
        for each in self.wrong:
            source = None if each.requirement.own else given_in_graph(each.requirement)
            if source is not None and each.requirement.count is not None:
                of = self.grouping.of(each.requirement.count.units(self.solution), each.group)
                numbers[each.group].append(_number(source, of))
        return numbers

    def _attributes(self) -> dict[int, list[Attribute]]:
        """Return the sizes in attributes, by group: those that were read in the run, and those of known modules."""
        counted: dict[tuple[str | int, ...], Array] = {}
        for source, (_, units) in self.known.items():
            if source.is_attribute and self.grouping.groups_in(units):
                counted[source.owner, source.name, *source.path] = units
        dimensions = {(each.tensor, each.dim): self.units[index] for index, each in enumerate(self.tracker.dimensions)}
        for module in sorted({tensor.rpartition(".")[0] for tensor, _ in dimensions}):
            for name, units in _widths(self.program.module(module), module, dimensions):
                counted.setdefault((module, name), units)
        attributes: dict[int, list[Attribute]] = defaultdict(list)
        for (module, name, *index), units in counted.items():
            for group in self.grouping.groups_in(units):
                at = cast("int | None", index[0] if index else None)
                attributes[group].append(Attribute(str(module), str(name), at, self.grouping.of(units, group)))
        return attributes

    def _norms(self) -> dict[int, list[Norm]]:
        norms: dict[int, list[Norm]] = defaultdict(list)
        for each in self.tracker.statistics:
            units = each.count.units(self.solution)
            for group in self.grouping.groups_in(units):
                norms[group].append(Norm(each.module, cast("Any", each.kind), self.grouping.of(units, group)))
        return norms

    def _replaced(self, group: int) -> tuple[str, ...]:
        found = [name for name, atoms in self.tracker.replaced if group in self._groups_of(atoms)]
        return tuple(dict.fromkeys(found))

    def _hard_coded(self, group: int) -> tuple[tuple[str, str], ...]:
        wrong = [each for each in self.wrong if each.group == group and each.requirement.own]
        return tuple({each.requirement.module: each.why for each in reversed(wrong)}.items())

    def _refused(self) -> Iterator[Refused]:
        for index in sorted(self.tracker.made):
            dimension, units = self.tracker.dimensions[index], self.units[index]
            if not (self.grouping.group[units] >= 0).any():
                reason = int(self.solution.fixed[dimension.atoms[0]])
                why = self.solution.reasons[reason] if reason >= 0 else _ONE_UNIT
                yield Refused(_layer(dimension), why, by_design=why == RESULT)


def _number(source: Source, units: tuple[int, ...]) -> Number:
    return Number(source.owner, source.specialization, source.name, source.path, units)


def _repeated(names: Mapping[int, str]) -> list[int]:
    """Return the groups whose name another one has too."""
    counts = Counter(names.values())
    return [group for group, name in names.items() if counts[name] > 1]


def _layer(dimension: Dimension) -> str:
    return dimension.tensor.rpartition(".")[0]


_PLAIN: Mapping[type[nn.Module], tuple[tuple[str, str, int], ...]] = {
    nn.Linear: (("in_features", "weight", 1), ("out_features", "weight", 0)),
    nn.Bilinear: (("out_features", "weight", 0), ("in1_features", "weight", 1), ("in2_features", "weight", 2)),
    nn.Embedding: (("embedding_dim", "weight", 1),),
    nn.EmbeddingBag: (("embedding_dim", "weight", 1),),
    nn.GroupNorm: (("num_channels", "weight", 0),),
    nn.modules.batchnorm._NormBase: (("num_features", "weight", 0), ("num_features", "running_mean", 0)),  # pyright: ignore[reportPrivateUsage]
    nn.RNNBase: (
        ("input_size", "weight_ih_l0", 1), ("proj_size", "weight_hr_l0", 0), ("hidden_size", "weight_hr_l0", 1),
        ("hidden_size", "weight_hh_l0", 1),
    ),
    nn.RNNCellBase: (("input_size", "weight_ih", 1), ("hidden_size", "weight_hh", 1)),
    nn.PReLU: (("num_parameters", "weight", 0),),
}  # fmt: skip
"""Class -> an attribute that says how wide a tensor is, and the tensor's dimension; the first that is there counts."""


def _widths(module: nn.Module, name: str, units: Mapping[tuple[str, int], Array]) -> Iterable[tuple[str, Array]]:
    """Yield the attributes of a module that count indices of its tensors, with the units along these."""
    done: set[str] = set()
    for kind, attributes in _PLAIN.items():
        for attribute, tensor, dim in attributes if isinstance(module, kind) else ():
            found = units.get((qualified(name, tensor), dim))
            if found is not None and attribute not in done and getattr(module, attribute) == len(found):
                done.add(attribute)
                yield attribute, found
    if isinstance(module, nn.modules.conv._ConvNd):  # pyright: ignore[reportPrivateUsage]
        yield from _of_convolution(module, *(units.get((qualified(name, "weight"), dim)) for dim in (0, 1)))


def _of_convolution(module: Any, first: Array | None, second: Array | None) -> Iterable[tuple[str, Array]]:
    """Yield the channels of a convolution: the weight has those of one group along one of its dimensions."""
    made, read = ("in_channels", "out_channels") if module.transposed else ("out_channels", "in_channels")
    if first is not None:
        yield made, first
    if second is not None:
        yield read, np.tile(second, module.groups)
    elif first is not None and module.groups > 1 and getattr(module, read) % module.groups == 0:
        yield read, first[:: max(len(first) // module.groups, 1)]

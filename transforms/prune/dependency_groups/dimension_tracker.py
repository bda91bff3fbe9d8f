"""What is known while a model runs: the atoms of its tensors, where it is, and what its sizes must count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .index_classes import Array, IndexClasses
from .labels import Block, Labels
from .sizes import Count, Requirement, Size

__all__ = ["Dimension", "DimensionTracker", "Place", "Statistic"]


@dataclass(frozen=True)
class Dimension:
    """One dimension of one parameter or buffer, with its atoms."""

    tensor: str
    dim: int
    atoms: Array


@dataclass(frozen=True)
class Place:
    """Where a run is: the innermost module, and the node of a graph that runs, where there is one."""

    module: str = ""
    owner: str | None = None
    specialization: int = 0
    node: str = ""


@dataclass(frozen=True)
class Statistic:
    """A statistic over labelled indices, at a place."""

    kind: str
    place: Place
    count: Count


@dataclass
class DimensionTracker:
    """Hold what a run finds out.

    Attributes:
        tensors: the parameters and buffers that may be cut: identity -> name and tensor.
        atoms: all atoms, and what was said of them.
        dimensions: of the tensors that were read, in the order of their first use.
        made: numbers of the dimensions that make the width of a value, as the rows of a linear's weight do.
        read: numbers of those that read one, as its columns do.
        requirements: between sizes and what they count.
        statistics: that run over labelled dimensions.
        heads: atoms of attention heads.
        place: where the run is.
        operator: the operator that runs.
        groups: the number of groups, as the convolution that runs was given it.
        normalized: the shape that the norm that runs was given.
        silent: whether operators are not followed, because a function around them is.
        own_forwards: whether modules with graphs run their own forwards.
        replaced: modules of torch that run with one width only, with the atoms of their dimensions.
    """

    tensors: Mapping[int, tuple[str, Tensor]]
    atoms: IndexClasses = field(default_factory=IndexClasses)
    dimensions: list[Dimension] = field(default_factory=list[Dimension])
    made: set[int] = field(default_factory=set[int])
    read: set[int] = field(default_factory=set[int])
    requirements: list[Requirement] = field(default_factory=list[Requirement])
    statistics: list[Statistic] = field(default_factory=list[Statistic])
    heads: list[Array] = field(default_factory=list[Array])
    replaced: list[tuple[str, Array]] = field(default_factory=list[tuple[str, Array]])
    place: Place = field(default_factory=Place)
    operator: str = ""
    groups: Any = 1
    normalized: Any = None
    silent: bool = False
    own_forwards: bool = False
    _first: dict[int, int] = field(default_factory=dict[int, int])
    _labels: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _parameters: dict[int, Labels] = field(default_factory=dict[int, Labels])

    @property
    def why(self) -> str:
        """Return the operation that runs, with its place."""
        return f"{self.operator} in {self.place.module or 'the model itself'}"

    @property
    def is_own_forward(self) -> bool:
        """Say whether the run is in the own forward of a module that has a graph."""
        return self.own_forwards and self.place.owner is not None and self.place.module == self.place.owner

    def knows(self, value: object) -> bool:
        """Say whether anything is known of a tensor's dimensions."""
        return isinstance(value, Tensor) and (id(value) in self.tensors or value in self._labels)

    def get(self, value: Tensor) -> Labels:
        """Return the labels of a tensor."""
        labels = self.look(value)
        if labels.spoilt is not None:
            self.atoms.fix(labels.spoilt, self.why)
        return labels

    def look(self, value: Tensor) -> Labels:
        """Return the labels of a tensor of which only the shape is asked."""
        known = cast("Labels | None", self._labels.get(value))
        if known is not None:
            return known
        if id(value) in self.tensors:
            if id(value) not in self._parameters:
                self._parameters[id(value)] = self._of_parameter(*self.tensors[id(value)])
            return self._parameters[id(value)]
        return Labels(tuple(value.shape))

    def set(self, value: Tensor, labels: Labels) -> None:
        """Note the labels of a tensor."""
        if id(value) in self.tensors:
            return
        if labels.blocks or labels.spoilt is not None or value in self._labels:
            self._labels[value] = labels

    def _of_parameter(self, name: str, tensor: Tensor) -> Labels:
        blocks: list[Block] = []
        for dim, size in enumerate(tensor.shape):
            if size > 1:
                atoms = self.atoms.new(size)
                self._first[int(atoms[0])] = len(self.dimensions)
                self.dimensions.append(Dimension(name, dim, atoms))
                blocks.append(Block((dim,), atoms))
        return Labels(tuple(tensor.shape), tuple(blocks))

    def dimension_of(self, atoms: Array) -> int | None:
        """Return the number of the dimension that atoms come from, judged by the first of them."""
        starts = np.fromiter(self._first, dtype=np.int64)
        first = int(atoms.flat[0])
        if first == 0 or not len(starts):
            return None
        at = int(np.searchsorted(starts, first, side="right")) - 1
        return self._first[int(starts[at])] if at >= 0 else None

    def makes(self, atoms: Array) -> None:
        """Note that these atoms are the width of what an operator makes."""
        number = self.dimension_of(atoms)
        if number is not None and number not in self.read:
            self.made.add(number)

    def reads(self, atoms: Array) -> None:
        """Note that these atoms read a width that others make."""
        number = self.dimension_of(atoms)
        if number is not None and number not in self.made:
            self.read.add(number)

    def keep_whole(self, labels: Labels, dims: Sequence[int] | None = None) -> Labels:
        """Say that dimensions stay whole because of the operator that runs: all of them by default."""
        return labels.whole(range(len(labels.shape)) if dims is None else dims, self.atoms, self.why)

    def join(self, left: Block | None, right: Block | None) -> None:
        """Join two lines that the operator pairs; where one of them stays whole, the other does."""
        if left is not None and right is not None:
            self.atoms.join(left.atoms, right.atoms, self.why)
            return
        for block in (left, right):
            if block is not None:
                self.atoms.fix(block.atoms, self.why)

    def require(self, size: Any, block: Block | None, dim: int) -> None:
        """Say that a size is the number of indices along a dimension; one that says "whatever fits" follows."""
        if not isinstance(size, int) or isinstance(size, bool) or size == -1:
            return
        if block is None and not isinstance(size, Size):
            return
        count = None if block is None else Count(block.atoms, block.dims.index(dim))
        self.requirements.append(Requirement(size, count, self.why, self.place.module, self.is_own_forward))

    def observe(self, kind: str, block: Block, dim: int) -> None:
        """Note a statistic over a dimension."""
        if not self.own_forwards:
            self.statistics.append(Statistic(kind, self.place, Count(block.atoms, block.dims.index(dim))))

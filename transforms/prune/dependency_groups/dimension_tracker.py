"""What is known while a model runs: the atoms of its tensors, where it is, and what its sizes must count."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .labels import FIXED, Array, Block, IndexClasses, Labels
from .sizes import Count, Requirement, Size

__all__ = ["Dimension", "DimensionTracker", "Statistic"]


@dataclass(frozen=True)
class Dimension:
    """One dimension of one parameter or buffer, with its atoms."""

    tensor: str
    dim: int
    atoms: Array


@dataclass(frozen=True)
class Statistic:
    """A statistic over labelled indices, and the module that computes it."""

    kind: str
    module: str
    count: Count


class DimensionTracker(IndexClasses):
    """Hold what a run finds out."""

    def __init__(self, tensors: Mapping[int, tuple[str, Tensor]]) -> None:
        super().__init__()
        self.tensors = tensors  # that may be cut: identity -> name and tensor
        self.dimensions: list[Dimension] = []  # of the tensors that were read, in the order of their first use
        self.made, self.read = set[int](), set[int]()  # dimensions that make a value's width, and those that read one
        self.requirements: list[Requirement] = []
        self.statistics: list[Statistic] = []  # over labelled dimensions
        self.heads: list[Array] = []  # atoms of attention heads
        self.replaced: list[tuple[str, Array]] = []  # modules of torch that run with one width only, and their atoms
        self.named: Mapping[str, Any] = {}  # what the operator that runs takes by name only
        self.given: Any = None  # the number of groups, or the shape, that the convolution or norm that runs was given
        self.silent = False  # operators are not followed, because a function around them is
        self.own_forwards = False  # modules with graphs run their own forwards
        self.is_own_forward = False  # the run is in such a forward
        self._labels = WeakTensorKeyDictionary()
        self._parameters: dict[int, Labels] = {}

    def knows(self, value: object) -> bool:
        """Say whether anything is known of a tensor's dimensions."""
        return isinstance(value, Tensor) and (id(value) in self.tensors or value in self._labels)

    def get(self, value: Tensor) -> Labels:
        labels = self.look(value)
        if labels.spoilt is not None:
            self.fix(labels.spoilt)
        return labels

    def look(self, value: Tensor) -> Labels:
        """Return the labels of a tensor of which only the shape is asked."""
        known = cast("Labels | None", self._labels.get(value))
        if known is None and id(value) in self.tensors:
            known = self._parameters.get(id(value)) or self._of_parameter(*self.tensors[id(value)])
        return Labels(tuple(value.shape)) if known is None else known

    def set(self, value: Tensor, labels: Labels) -> None:
        if id(value) not in self.tensors and (labels.blocks or labels.spoilt is not None or value in self._labels):
            self._labels[value] = labels

    def _of_parameter(self, name: str, tensor: Tensor) -> Labels:
        blocks: list[Block] = []
        for dim, size in enumerate(tensor.shape):
            if size > 1:
                atoms = self.new(size)
                self.dimensions.append(Dimension(name, dim, atoms))
                blocks.append(Block((dim,), atoms))
        labels = self._parameters[id(tensor)] = Labels(tuple(tensor.shape), tuple(blocks))
        return labels

    def _note(self, block: Block | None, into: set[int], unless: set[int]) -> None:
        """Note the dimension that a block's atoms come from, judged by the first of them."""
        first = FIXED if block is None else int(block.atoms.flat[0])
        number = bisect_right(self.dimensions, first, key=lambda each: int(each.atoms[0])) - 1
        if number >= 0 and first <= self.dimensions[number].atoms[-1] and number not in unless:
            into.add(number)

    def makes(self, block: Block | None) -> None:
        """Note that a block is the width of what an operator makes."""
        self._note(block, self.made, self.read)

    def reads(self, block: Block | None) -> None:
        """Note that a block reads a width that others make."""
        self._note(block, self.read, self.made)

    def keep_whole(self, labels: Labels, dims: Collection[int] | None = None, because: str = "") -> Labels:
        """Say that dimensions stay whole because of the operator that runs: all of them by default."""
        return labels.whole(range(len(labels.shape)) if dims is None else dims, self, self.why + because)

    def pair(self, *blocks: Block | None) -> Block | None:
        """Join blocks that the operator pairs, and return the first; where one of them stays whole, all do."""
        given = [block for block in blocks if block is not None]
        for block in given:
            if len(given) < len(blocks):
                self.fix(block.atoms)
            elif block is not given[0]:
                self.join(given[0].atoms, block.atoms)
        return given[0] if len(given) == len(blocks) else None

    def require(self, size: Any, block: Block | None, dim: int = 0) -> None:
        """Say that a size is the number of indices along a dimension; one that says "whatever fits" follows."""
        if not isinstance(size, int) or isinstance(size, bool) or size == -1:
            return
        if block is not None or isinstance(size, Size):
            count = None if block is None else Count(block.atoms, block.dims.index(dim))
            self.requirements.append(Requirement(size, count, self.why, self.module, self.is_own_forward))

    def observe(self, kind: str, block: Block, dim: int) -> None:
        if not self.own_forwards:
            self.statistics.append(Statistic(kind, self.module, Count(block.atoms, block.dims.index(dim))))

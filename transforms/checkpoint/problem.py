"""What a solver must know of a model: the steps of its forward in order, and which of them may be run again as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

__all__ = ["Problem", "Recomputed", "Region", "Schedule", "Step"]

_NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Step:
    """One operation of a forward. Activations are known by numbers.

    Attributes:
        reads: the activations that it is given.
        makes: those that it allocates.
        saves: those that autograd keeps for its backward.
        operations: what running it costs.
        until_saved: what it costs until it has saved the last of `saves`.
        products: those of `makes` that are matrix products or convolutions, dear to compute again.
        light: what running it costs where its products are there already.
        light_until_saved: likewise until the last of `saves`.
    """

    reads: frozenset[int] = _NOTHING
    makes: frozenset[int] = _NOTHING
    saves: frozenset[int] = _NOTHING
    operations: float = 0.0
    until_saved: float = 0.0
    products: frozenset[int] = _NOTHING
    light: float = 0.0
    light_until_saved: float = 0.0


@dataclass(frozen=True, order=True)
class Region:
    """Steps from `start` to before `stop` that run again for their backward; a selective one keeps its products."""

    start: int
    stop: int
    selective: bool = False


@dataclass(frozen=True)
class Recomputed:
    """What a region keeps and what it costs.

    Attributes:
        keeps: the activations that are held from its forward to its backward.
        restores: bytes that its backward holds on top of these, once it has been run again.
        operations: what running it again costs.
    """

    keeps: frozenset[int]
    restores: int
    operations: float


@dataclass(frozen=True)
class Schedule:
    """Regions that do not overlap, in order, and what is to be expected of them.

    Attributes:
        regions: what is run again.
        operations: what that costs.
        live: bytes of activations that are held after the forward.
        peak: the most bytes of activations that are held at once, while the backward runs regions again.
    """

    regions: tuple[Region, ...]
    operations: float
    live: int
    peak: int


@dataclass(frozen=True)
class Problem:
    """The forward of a model, and what may be chosen.

    Attributes:
        steps: in the order in which they run; their backwards run in the opposite one.
        sizes: activation -> bytes. Others (parameters, inputs, results) are held in any case, and free.
        spans: the regions among which to choose.
        overhead: what a region costs beside its operations, in operations.
    """

    steps: Sequence[Step]
    sizes: Mapping[int, int]
    spans: Sequence[Region]
    overhead: float = 0.0
    _made_at: dict[int, int] = field(default_factory=dict[int, int], init=False, repr=False)

    def __post_init__(self) -> None:
        for number, step in enumerate(self.steps):
            for activation in step.makes:
                self._made_at.setdefault(activation, number)

    def bytes_of(self, activations: Iterable[int]) -> int:
        """Return the size of activations together."""
        return sum(self.sizes.get(activation, 0) for activation in activations)

    @cached_property
    def saved(self) -> int:
        """Return the bytes that the plain model holds after its forward."""
        return self.bytes_of({activation for step in self.steps for activation in step.saves})

    @cached_property
    def operations(self) -> float:
        """Return what one forward costs."""
        return sum(step.operations for step in self.steps)

    @cached_property
    def flow(self) -> list[tuple[int, int]]:
        """Return pairs of a step and a later one that reads what it makes."""
        read = ((self._made_at.get(a, number), number) for number, step in enumerate(self.steps) for a in step.reads)
        return [(made, number) for made, number in read if made < number]

    @cached_property
    def crossing(self) -> list[frozenset[int]]:
        """Return for each place between steps the activations made before it that are of use behind it."""
        last: dict[int, int] = {}
        for number, step in enumerate(self.steps):
            last.update(dict.fromkeys(step.reads | step.saves, number))
        found: list[set[int]] = [set() for _ in range(len(self.steps) + 1)]
        for activation, made in self._made_at.items():
            if activation in self.sizes:
                for place in range(made + 1, last.get(activation, made) + 1):
                    found[place].add(activation)
        return [frozenset(activations) for activations in found]

    def recomputed(self, region: Region) -> Recomputed:
        """Return what a region keeps and costs.

        Recomputation stops once all is there that the backward needs: what follows the last save is not run again.
        """
        steps = self.steps[region.start : region.stop]
        keeps: set[int] = set()
        saves: set[int] = set()
        operations = total = 0.0
        for step in steps:
            keeps.update(a for a in step.reads if self._made_at.get(a, region.start) < region.start)
            if step.saves:
                operations = total + (step.light_until_saved if region.selective else step.until_saved)
                saves |= step.saves
            total += step.light if region.selective else step.operations
            if region.selective:
                keeps |= step.products
        restored = {a for a in saves - keeps if self._made_at.get(a, -1) >= region.start}
        known = frozenset(a for a in keeps if a in self.sizes)
        return Recomputed(known, self.bytes_of(restored), operations + self.overhead)

    def schedule(self, regions: Iterable[Region]) -> Schedule:
        """Return what is to be expected of regions that do not overlap."""
        chosen = tuple(sorted(regions))
        starts = {region.start: region for region in chosen}
        held: set[int] = set()
        place, peak, operations = 0, 0, 0.0
        while place < len(self.steps):
            region = starts.get(place)
            if region is None:
                held |= self.steps[place].saves
                place += 1
                continue
            again = self.recomputed(region)
            held |= again.keeps
            peak = max(peak, self.bytes_of(held) + again.restores)
            operations += again.operations
            place = region.stop
        live = self.bytes_of(held)
        return Schedule(chosen, operations, live, max(peak, live))

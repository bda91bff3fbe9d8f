"""What a solver must know of a model: the steps of its forward in order, and which of them may be run again as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

__all__ = ["Problem", "Recomputed", "Region", "Schedule", "Step"]

_NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Step:
    """One operation of a forward. Activations are known by numbers."""

    reads: frozenset[int] = _NOTHING  # the activations that it is given
    makes: frozenset[int] = _NOTHING  # those that it allocates
    saves: frozenset[int] = _NOTHING  # those that autograd keeps for its backward
    operations: float = 0.0  # what running it costs
    until_saved: float = 0.0  # what it costs until it has saved the last of `saves`
    products: frozenset[int] = _NOTHING  # those of `makes` that are dear to compute again
    light: float = 0.0  # what running it costs where its products are there already
    light_until_saved: float = 0.0  # likewise until the last of `saves`
    learned: int = 0  # bytes of the gradients of parameters that its backward makes


@dataclass(frozen=True, order=True)
class Region:
    """Steps from `start` to before `stop` that run again for their backward; a selective one keeps its products."""

    start: int
    stop: int
    selective: bool = False


@dataclass(frozen=True)
class Recomputed:
    """What a region keeps and what it costs."""

    keeps: frozenset[int]  # the activations that are held from its forward to its backward
    needs: int  # the most bytes that its backward takes on top of these: what it has computed again, and gradients
    operations: float  # what running it again costs


@dataclass(frozen=True)
class Schedule:
    """Regions that do not overlap, in order, and what is to be expected of them."""

    regions: tuple[Region, ...]
    operations: float  # what that costs
    live: int  # bytes of activations that are held after the forward
    peak: int  # likewise at the worst moment, with gradients that the plain step has no room for


@dataclass(frozen=True)
class Problem:
    """The forward of a model, and what may be chosen."""

    steps: Sequence[Step]  # in the order in which they run; their backwards run in the opposite one
    sizes: Mapping[int, int]  # activation -> bytes. Others (parameters, inputs, results) are held in any case, and free
    spans: Sequence[Region]  # the regions among which to choose
    overhead: float = 0.0  # what a region costs beside its operations, in operations
    gradients: Mapping[int, int] = field(default_factory=dict[int, int])  # activation -> bytes of its gradient
    results: frozenset[int] = _NOTHING  # those of them whose gradient is there when the backward begins
    loss: int = 0  # bytes that the backward takes at its beginning, beside what the model holds
    _made_at: dict[int, int] = field(default_factory=dict[int, int], init=False, repr=False)

    def __post_init__(self) -> None:
        for number, step in enumerate(self.steps):
            for activation in step.makes:
                self._made_at.setdefault(activation, number)

    def bytes_of(self, activations: Iterable[int]) -> int:
        return sum(self.sizes.get(activation, 0) for activation in activations)

    @cached_property
    def saved(self) -> int:
        """Return the bytes that the plain model holds after its forward."""
        return self.bytes_of({activation for step in self.steps for activation in step.saves})

    @cached_property
    def operations(self) -> float:
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

    @cached_property
    def _gradients(self) -> list[int]:
        """Return for each step the bytes of activations' gradients while its backward runs: what passes by is there."""
        last = {activation: number for number, step in enumerate(self.steps) for activation in step.reads}
        last.update(dict.fromkeys(self.results, len(self.steps)))
        change = [0] * (len(self.steps) + 2)
        for activation, size in self.gradients.items():
            made = self._made_at.get(activation)
            if made is not None:
                change[made] += size
                change[max(last.get(activation, made), made) + 1] -= size
        added = (sum(self.gradients.get(a, 0) for a in s.reads if last[a] > n) for n, s in enumerate(self.steps))
        return [passing + more for passing, more in zip(accumulate(change), added, strict=False)]

    @cached_property
    def room(self) -> int:
        """Return how much more than what it saves the plain model takes at the worst moment of its backward."""
        held: set[int] = set()
        live = peak = 0
        for step, gradients in zip(self.steps, self._gradients, strict=True):
            live += self.bytes_of(step.saves - held)
            held |= step.saves
            peak = max(peak, live + gradients + step.learned)
        return max(self.loss, peak - self.saved)

    @cached_property
    def needs(self) -> list[int]:
        """Return for each step the bytes of gradients while its backward runs; those of parameters if there is room."""
        pairs = zip(self._gradients, self.steps, strict=True)
        return [max(gradients, min(self.room, gradients + step.learned)) for gradients, step in pairs]

    def stepped(self, place: int) -> Recomputed:
        """Return what a step keeps that is in no region."""
        known = frozenset(a for a in self.steps[place].saves if a in self.sizes)
        return Recomputed(known, self.needs[place], 0.0)

    def keeps(self, region: Region) -> frozenset[int]:
        """Return the activations that a region holds from its forward to its backward."""
        steps = self.steps[region.start : region.stop]
        keeps = {a for step in steps for a in step.reads if self._made_at.get(a, region.start) < region.start}
        if region.selective:
            keeps.update(product for step in steps for product in step.products)
        return frozenset(keeps & self.sizes.keys())

    def recomputed(self, region: Region) -> Recomputed:
        """Return what a region keeps and costs: what follows the last save is not run again."""
        operations = total = 0.0
        for step in self.steps[region.start : region.stop]:
            if step.saves:
                operations = total + (step.light_until_saved if region.selective else step.until_saved)
            total += step.light if region.selective else step.operations
        keeps = self.keeps(region)
        return Recomputed(keeps, self._needs(region, keeps), operations + self.overhead)

    def _needs(self, region: Region, keeps: frozenset[int]) -> int:
        """Return the most bytes that the backward of a region takes; each step's frees what that step has saved."""
        restored: set[int] = set()
        held = most = 0
        for place in range(region.start, region.stop):
            new = {a for a in self.steps[place].saves - keeps - restored if self._made_at.get(a, -1) >= region.start}
            restored |= new
            held += self.bytes_of(new)
            most = max(most, held + self.needs[place])
        return most

    def schedule(self, regions: Iterable[Region]) -> Schedule:
        """Return what is to be expected of regions that do not overlap."""
        chosen = tuple(sorted(regions))
        starts = {region.start: region for region in chosen}
        held: set[int] = set()
        place, live, peak, operations = 0, 0, 0, 0.0
        while place < len(self.steps):
            region = starts.get(place)
            again = self.stepped(place) if region is None else self.recomputed(region)
            live += self.bytes_of(again.keeps - held)
            held |= again.keeps
            peak, operations = max(peak, live + again.needs), operations + again.operations
            place = place + 1 if region is None else region.stop
        return Schedule(chosen, operations, live, max(live, peak - self.room))

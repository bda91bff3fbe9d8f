"""Which units are kept, and the sites that say as plain values what is cut for that, and where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...passes.sites import Site
from ...tracing.program import Program, TensorOwners
from .dependency_groups import Group

__all__ = ["Chosen", "kept_indices", "sites_of"]


@dataclass(frozen=True)
class Chosen:
    """A group of units, and the numbers of those that are kept, in order."""

    group: Group
    kept: tuple[int, ...]

    def __str__(self) -> str:
        return f"removes {self.group.size - len(self.kept)} of {self.group.size} {self.group.kind} of {self.group.name}"


def kept_indices(units: Sequence[int], kept: Collection[int]) -> list[int]:
    """Return the places along a dimension that stay, where each belongs to a unit, or to none (-1)."""
    known = set(kept)
    return [place for place, unit in enumerate(units) if unit < 0 or unit in known]


def sites_of(program: Program, chosen: Sequence[Chosen]) -> Iterator[Site]:
    """Yield a site for each group; groups that cut one dimension of a tensor, as concatenated ones do, share a site."""
    for together in _coupled(program, chosen):
        if any(len(each.kept) < each.group.size for each in together):
            yield _SiteOf(program, together).site()


def _first_name(program: Program, tensor: str) -> str:
    """Return under which name a tensor is cut, which may be tied to others."""
    return program.analyses[TensorOwners].names(tensor)[0]


def _coupled(program: Program, chosen: Sequence[Chosen]) -> list[list[Chosen]]:
    """Return groups with those together that cut one dimension of a tensor."""
    found: list[tuple[list[int], set[tuple[str, int]]]] = []
    for number, each in enumerate(chosen):
        cutting = {(_first_name(program, cut.tensor), cut.dim) for cut in each.group.cuts}
        touching = [one for one in found if one[1] & cutting]
        numbers = sorted([number, *(other for others, _ in touching for other in others)])
        found = [one for one in found if not one[1] & cutting] + [(numbers, cutting.union(*(c for _, c in touching)))]
    return [[chosen[number] for number in numbers] for numbers, _ in sorted(found, key=lambda one: one[0])]


class _SiteOf:
    """One site over groups that are cut together."""

    def __init__(self, program: Program, chosen: Sequence[Chosen]) -> None:
        self.program, self.chosen = program, chosen
        self.tensors: dict[tuple[str, int], tuple[int, set[int]]] = {}
        self.numbers: dict[tuple[str, int, str, tuple[str | int, ...]], int] = defaultdict(int)
        self.attributes: dict[tuple[str, str, int | None], int] = defaultdict(int)
        self.norms: dict[tuple[str, int], set[int]] = defaultdict(set)
        for each in chosen:
            self._add(each)

    def _add(self, each: Chosen) -> None:
        kept, group = set(each.kept), each.group
        # A tied tensor may be named twice.
        cuts = {(_first_name(self.program, cut.tensor), cut.dim): cut for cut in group.cuts}
        for key, cut in cuts.items():
            size, gone = self.tensors.setdefault(key, (len(cut.units), set()))
            gone.update(set(range(size)) - set(kept_indices(cut.units, kept)))
        for number in dict.fromkeys(group.numbers):
            key = number.owner, number.specialization, number.node, number.path
            self.numbers[key] += _gone(number.units, kept)
        attributes = {(self._names(a.module)[0], a.name, a.index): a for a in group.attributes}
        for key, attribute in attributes.items():
            self.attributes[key] += _gone(attribute.units, kept)
        for norm in group.norms:
            size = len(norm.units)
            self.norms[norm.module, size].update(set(range(size)) - set(kept_indices(norm.units, kept)))

    def site(self) -> Site:
        owners: dict[tuple[str, int], dict[str, str]] = {}
        labels: dict[tuple[str, int, str], str] = {}
        for owner, specialization, node, _ in self.numbers:
            if (owner, specialization, node) not in labels:
                label = labels[owner, specialization, node] = f"size_{len(labels)}"
                owners.setdefault((owner, specialization), {})[label] = node
        for module in self._modules():
            owners.setdefault((module, 0), {})
        first, *others = map(str, self.chosen)
        parts = [Site(self.program, owner, nodes, number) for (owner, number), nodes in owners.items()]
        around = Site.over(self.program, *parts).owner
        return Site(
            self.program, around, {}, parts=tuple(parts), data=self._data(around, labels),
            label=self.chosen[0].group.name, detail=f"{first} and of {len(others)} more layers" if others else first,
        )  # fmt: skip

    def _modules(self) -> Iterable[str]:
        """Return the modules that the site is in, under all their names; of replaced ones, those around them."""
        replaced = [module for each in self.chosen for module in each.group.replaced]
        listed = [each.group.listed for each in self.chosen if each.group.listed is not None]
        skipped = [name.rpartition(".")[0] for each in self.chosen for name, _ in each.group.blocks]
        for module in (*replaced, *listed, *skipped):
            yield from (name.rpartition(".")[0] for name in self._names(module))
        for tensor, _ in self.tensors:
            yield from (name.rpartition(".")[0] for name in self.program.analyses[TensorOwners].names(tensor))
        for module in (*(module for module, _, _ in self.attributes), *(module for module, _ in self.norms)):
            yield from self._names(module)

    def _names(self, module: str) -> Sequence[str]:
        """Return all names of a module, the first one first."""
        return self.program.names.names(self.program.module(module))

    def _data(self, around: str, labels: Mapping[tuple[str, int, str], str]) -> dict[str, Any]:
        """Return what is cut, in names as the module around the site has them; equal lists are kept once."""
        lists: dict[tuple[int, ...], int] = {}

        def number_of(size: int, gone: set[int]) -> int:
            return lists.setdefault(tuple(place for place in range(size) if place not in gone), len(lists))

        def inside(name: str) -> str:
            return name[len(around) + 1 :] if around else name

        experts = [(each.group, each.kept) for each in self.chosen if each.group.kind == "experts"]
        data: dict[str, Any] = {
            "units": {each.group.name: [each.group.kind, each.group.size, list(each.kept)] for each in self.chosen},
            "tensors": [
                [inside(tensor), dim, size, number_of(size, gone)]
                for (tensor, dim), (size, gone) in self.tensors.items() if gone
            ],
            "numbers": [
                [labels[owner, specialization, node], list(path), gone]
                for (owner, specialization, node, path), gone in self.numbers.items() if gone
            ],
            "attributes": [
                [inside(module), name, index, gone] for (module, name, index), gone in self.attributes.items() if gone
            ],
            "norms": [
                [inside(module), size, number_of(size, gone)] for (module, size), gone in self.norms.items() if gone
            ],
            "routers": [
                [inside(group.router.module), group.size, lists.setdefault(kept, len(lists))]
                for group, kept in experts if group.router is not None
            ],
            "experts": [
                [inside(group.listed), group.size, lists.setdefault(kept, len(lists))]
                for group, kept in experts if group.listed is not None
            ],
            "skipped": [
                [inside(name), length] for each in self.chosen for unit, (name, length) in enumerate(each.group.blocks)
                if unit not in each.kept
            ],
            "replaced": sorted({inside(module) for each in self.chosen for module in each.group.replaced}),
            "hard_coded": sorted({module for each in self.chosen for module, _ in each.group.hard_coded}),
        }  # fmt: skip
        return {**data, "lists": [list(places) for places in lists]}


def _gone(units: Sequence[int], kept: Collection[int]) -> int:
    """Return how much smaller a size becomes that counts these units."""
    return len(units) - len(kept_indices(units, kept))

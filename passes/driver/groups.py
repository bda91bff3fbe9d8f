"""Sites of one graph, decided as one, and the ways of rewriting them: alone, a site may save too little to be seen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ...compat import all_modules, own_parameters
from ...tracing.program import Program
from .. import timing, verification
from ..contract import Pass
from ..rewriting import Edit
from ..sites import Cause, Phase, Reason, Refusal, Site

__all__ = [
    "WITH_THE_WHOLE", "Candidate", "Group", "Race", "changes", "grouped", "grouped_in_order", "identity", "is_like",
    "narrowed", "rewriting", "timed_identity", "with_lowering",
]  # fmt: skip

WITH_THE_WHOLE = "with the whole model"
"""How a rewrite was checked that was not checked by itself."""
_MOST_CLASSES = 8  # so many classes of alike sites are judged apart; more are taken several at a time
_STEPS = 100.0
"""So many steps of a module, forward and backward, verify it in both modes: of a GPT-2 of three layers, 110."""
_STEP = 4.0  # so many forwards a step takes, in float64 and in the module's own types
_OF_TIME = 0.5  # verifying one clean-up takes no more than this part of the time that is left


@dataclasses.dataclass(frozen=True)
class Group:
    """Sites of one graph that are decided as one, mostly a single one; each with its lowering, or with none yet."""

    sites: tuple[Site, ...]

    @property
    def owner(self) -> str:
        return self.sites[0].owner

    @property
    def phase(self) -> Phase | None:
        return self.sites[0].phase

    @property
    def required(self) -> bool:
        return self.sites[0].required

    def may_be_left(self, pass_: Pass) -> bool:
        """Say whether a pass rewrites it for speed alone, and nobody asked for it by name, or may be skipped."""
        return pass_.skippable or (pass_.only_speeds_up and not self.required)

    @property
    def is_single(self) -> bool:
        return len(self.sites) == 1

    @property
    def key(self) -> str:
        """Name the group, as `Site.key` does a site."""
        nodes = {f"{n}.{label}": name for n, site in enumerate(self.sites) for label, name in site.nodes.items()}
        return dataclasses.replace(self.sites[0], nodes=nodes).key

    @property
    def label(self) -> str:
        """Return what reports call the group."""
        first = self.sites[0].label or self.owner or "(root)"
        return first if self.is_single else f"{first} and {len(self.sites) - 1} more"

    @property
    def choices(self) -> tuple[str | None, ...]:
        """Return the lowerings that one of the sites has, or None where there is nothing to choose."""
        return tuple(dict.fromkeys(choice for site in self.sites for choice in site.choices)) or (None,)

    def lowered(self, choice: str | None) -> Group:
        """Return the group with one lowering for all sites that have it, and the first for the others."""
        return Group(tuple(with_lowering(site, choice) for site in self.sites))

    def chosen_as(self, other: Group) -> Group:
        """Return those of the sites that another group has too, with the lowerings that are chosen there."""
        choices = {timed_identity(site): site.choice for site in other.sites}
        kept = [site for site in self.sites if timed_identity(site) in choices]
        return Group(tuple(dataclasses.replace(site, choice=choices[timed_identity(site)]) for site in kept))

    def without(self, sites: Iterable[Site]) -> tuple[Site, ...]:
        """Return the other sites, whatever is chosen for those given."""
        known = {identity(site) for site in sites}
        return tuple(site for site in self.sites if identity(site) not in known)

    def replaced(self, old: Iterable[Site], new: Iterable[Site]) -> Group:
        """Return the group with other lowerings for some of its sites, or without them."""
        changed = {identity(site): site for site in new}
        gone = {identity(site) for site in old} - changed.keys()
        return Group(tuple(changed.get(identity(s), s) for s in self.sites if identity(s) not in gone))

    def classes(self) -> list[tuple[Site, ...]]:
        """Return the sites with those that are alike together; where kinds are many, several kinds make one class."""
        return _classes(self.sites)

    def rest(self, written: Group) -> list[Group]:
        """Return what was not written with the others, alike sites together."""
        return [Group(sites) for sites in _classes(self.without(written.sites))]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way of rewriting a group, and what is known of it; `edit` is set while it stands in the program."""

    group: Group
    failure: Reason | None = None  # why it is not to be had
    is_hopeless: bool = dataclasses.field(default=False, kw_only=True)  # with any other lowering, too
    verdict: verification.Verdict | None = None  # None: not checked
    edit: Edit | None = None
    runner: timing.Runner | None = None
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    @classmethod
    def wrong(cls, group: Group, verdict: verification.Verdict) -> Candidate:
        """Return a group that is left as it is, since a rewrite of it gives something else."""
        errors = {"meaning_error": verdict.meaning_error, "precision_error": verdict.precision_error}
        known = {name: error for name, error in errors.items() if math.isfinite(error)}
        return cls(group, Reason(Cause.DIFFERS, known, verdict.reason))

    @property
    def status(self) -> str:
        """Return what the decision on it is called."""
        if self.failure is None:
            return "applied"
        return {"budget": "skipped", "rewrite": "refused"}.get(self.failure.cause.stage, "undone")

    @property
    def was_written(self) -> bool:
        """Say whether the pass could write it."""
        return self.status != "refused"


@dataclasses.dataclass(frozen=True)
class Race:
    """Candidates that were timed side by side, by name."""

    candidates: Mapping[str, Candidate]
    timings: timing.Timings

    @property
    def best(self) -> str:
        """Return the fastest or, of those that are not shown to be 2% slower, the first."""
        return self.timings.fastest(prefer=tuple(self.candidates))

    def without_best(self) -> Race | None:
        """Return what the race says of the others, if there are any."""
        others = {name: candidate for name, candidate in self.candidates.items() if name != self.best}
        return Race(others, self.timings) if others else None


def narrowed(
    program: Program, pass_: Pass, found: Iterable[Group | Refusal], budget: timing.TimeBudget
) -> list[Group | Refusal]:
    """Return what a pass found, without what there is too little time for.

    Of a clean-up, that is what would leave none to the passes behind it: it saves little. In a model in evaluation it
    is written for that mode alone: gradients of a large model take most time and memory.
    """
    if not pass_.clean_up:
        return list(_written_in_time(pass_, found, budget))
    left, whole = _OF_TIME * (budget.for_sites - budget.spent), max(_size(program.model), 1)
    steps = _STEPS * budget.forward * (1.0 if program.training else _STEP)

    def affordable(group: Group) -> Group | Refusal:
        if left <= 0.0 or steps * _size(program.module(group.owner)) / whole <= left:
            return group
        if program.training:
            return Refusal(Reason.of(Cause.TOO_COSTLY), group.label)
        return Group(tuple(dataclasses.replace(site, phase=Phase.EVAL) for site in group.sites))

    return [affordable(each) if isinstance(each, Group) else each for each in found]


def _written_in_time(
    pass_: Pass, found: Iterable[Group | Refusal], budget: timing.TimeBudget
) -> Iterator[Group | Refusal]:
    """Yield what a pass found, without what it would write beyond the time: nothing ends a conversion by an engine."""
    end, taken = budget.end_of_check, budget.spent
    for each in found:
        if not isinstance(each, Group) or each.required:
            yield each
            continue
        needs = sum(map(pass_.seconds_to_write, each.sites))
        if needs and taken + needs > end:
            yield Refusal(Reason(Cause.TOO_LONG, {**budget.values, "needs": needs}), each.label)
        else:
            taken += needs
            yield each


def _size(module: nn.Module) -> int:
    own = (parameter for each in all_modules(module) for parameter in own_parameters(each).values())
    return sum(parameter.numel() for parameter in own if parameter is not None)


def identity(site: Site) -> Hashable:
    """Return what tells sites of one module apart, whatever is chosen for them; those of equal modules may be equal."""
    inside = len(site.owner)
    parts = ((part.owner[inside:], part.specialization, identity(part)) for part in site.parts)
    return tuple(site.nodes.items()), tuple(parts), repr(site.data)


def timed_identity(site: Site) -> Hashable:
    """Return what `identity` does, but for the data of a site that says by its kind what is measured of it."""
    return identity(site) if site.kind is None else (identity(dataclasses.replace(site, data={})), site.kind)


def with_lowering(site: Site, choice: str | None) -> Site:
    """Return a site with a lowering, or with its first where it has no such one."""
    first = next(iter(site.choices), None)
    return dataclasses.replace(site, choice=choice if choice in site.choices else first)


def _classes(sites: Sequence[Site]) -> list[tuple[Site, ...]]:
    classes: dict[Hashable, list[Site]] = {}
    for number, site in enumerate(sites):
        classes.setdefault(("one", number) if site.kind is None else ("kind", site.kind), []).append(site)
    alike, size = list(classes.values()), -(-len(classes) // _MOST_CLASSES) or 1
    starts = range(0, len(alike), size)
    return [tuple(site for each in alike[first : first + size] for site in each) for first in starts]


def rewriting(passes: Sequence[Pass]) -> list[Pass]:
    """Return the passes that rewrite; those that act on the finished model come after them."""
    return [pass_ for pass_ in passes if not pass_.finishes]


def sharing(passes: Sequence[Pass]) -> list[int]:
    """Return among how many each pass shares the time that is left: itself, and those behind that must be done, or
    that are to be compared with it.
    """
    behind = [passes[place + 1 :] for place in range(len(passes))]
    return [
        1 + (pass_.contested and bool(others)) + sum(not other.skippable for other in others)
        for pass_, others in zip(passes, behind, strict=True)
    ]


def grouped(pass_: Pass, found: Iterable[Site | Refusal]) -> list[Group | Refusal]:
    """Return what a pass found, the sites of one graph as a group in the place of the first of them.

    Sites of a pass that changes the function are left apart: what one does decides what the next one sees.
    """
    groups: dict[Hashable, list[Site]] = {}
    result: dict[Hashable, Refusal | None] = {}
    for number, item in enumerate(found):
        key = _place(pass_, item) if isinstance(item, Site) and pass_.numerics.keeps_function else number
        result.setdefault(key, item if isinstance(item, Refusal) else None)
        if isinstance(item, Site):
            groups.setdefault(key, []).append(item)
    return [refusal or Group(tuple(groups[key])) for key, refusal in result.items()]


def grouped_in_order(pass_: Pass, sites: Sequence[Site]) -> list[Group]:
    """Return sites in their order; those that follow one another in one graph are a group."""
    rows: list[list[Site]] = []
    for site in sites:
        if rows and pass_.numerics.keeps_function and _place(pass_, rows[-1][-1]) == _place(pass_, site):
            rows[-1].append(site)
        else:
            rows.append([site])
    return [Group(tuple(row)) for row in rows]


def _place(pass_: Pass, site: Site) -> Hashable:
    """Return what sites have in common that are decided as one: their graph; of clean-ups, all graphs of a module.

    Checking one of these graphs runs the others.
    """
    graph = None if pass_.clean_up else site.specialization
    return site.owner, graph, site.phase, site.required, site.key if site.parts else ""


def is_like(site: Site, other: object) -> bool:
    """Say whether what holds of another site holds of this one, too; of every one, where it is not known of which."""
    if not isinstance(other, Site):
        return True
    return site == other or (site.kind is not None and site.kind == other.kind and site.choice == other.choice)


def changes(classes: Sequence[Sequence[Site]], choices: Sequence[str]) -> Iterator[tuple[int, list[Site]]]:
    """Yield the number of a class and what may become of it: nothing of it is rewritten, or by another lowering."""
    yield from ((number, list[Site]()) for number in range(len(classes)))
    for choice in choices:
        for number, sites in enumerate(classes):
            changed = [with_lowering(site, choice) for site in sites]
            if changed != list(sites) and all(site.choice == choice for site in changed):
                yield number, changed

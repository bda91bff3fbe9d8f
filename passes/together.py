"""Sites of one graph, decided as one: what each saves alone may be too little to be seen, or need the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence

from .base import Numerics, Pass, Refusal, Site
from .plan import Decision

__all__ = ["classes_of", "grouped", "identity", "left_of", "others", "parts_of", "resolved", "rows", "together"]

_MOST_CLASSES = 8
"""So many groups of alike sites are judged apart; more are taken several at a time."""


def grouped(pass_: Pass, found: Iterable[Site | Refusal]) -> list[Site | Refusal]:
    """Return what a pass found with the sites of one graph joined, each group in the place of its first site.

    Sites of a pass that changes the function are left apart: what one does decides what the next one sees.
    """
    if not _keeps_function(pass_):
        return list(found)
    groups: dict[Hashable, list[Site | Refusal]] = {}
    for number, item in enumerate(found):
        groups.setdefault(_place(item) if isinstance(item, Site) else number, []).append(item)
    return [joined for group in groups.values() for joined in _joined(group)]


def _keeps_function(pass_: Pass) -> bool:
    return pass_.numerics in (Numerics.EXACT, Numerics.REASSOCIATED)


def _place(site: Site) -> Hashable:
    return site.home, site.variant, site.phase, site.required


def _joined(group: Sequence[Site | Refusal]) -> Iterable[Site | Refusal]:
    sites = [item for item in group if isinstance(item, Site)]
    return (together(sites),) if len(sites) > 1 else group


def together(sites: Sequence[Site]) -> Site:
    """Return several sites of one graph as one, or the only one as it is."""
    first = sites[0]
    if len(sites) == 1:
        return first
    nodes = {f"{number}.{label}": name for number, site in enumerate(sites) for label, name in site.nodes.items()}
    return dataclasses.replace(
        first,
        nodes=nodes,
        choices=tuple(dict.fromkeys(choice for site in sites for choice in site.choices)),
        choice=None,
        detail=f"{len(sites)} sites",
        label=f"{first.label or first.home or '(root)'} and {len(sites) - 1} more",
        kind=None,
        parts=tuple(sites),
    )


def parts_of(site: Site) -> tuple[Site, ...]:
    """Return the sites that are decided as this one: itself, where it is not several."""
    return site.parts or (site,)


def identity(site: Site) -> Hashable:
    """Return what tells sites of one graph apart, whatever is chosen for them."""
    return tuple(site.nodes.items())


def others(sites: Iterable[Site], known: Iterable[Site]) -> list[Site]:
    """Return the sites that are not among those `known`, whatever was chosen for these."""
    identities = {identity(site) for site in known}
    return [site for site in sites if identity(site) not in identities]


def left_of(whole: Site, written: Site) -> list[Site]:
    """Return the parts of a site that were not written with the others, alike ones together."""
    return [together(sites) for sites in classes_of(others(parts_of(whole), parts_of(written)))]


def rows(pass_: Pass, planned: Sequence[tuple[Decision, Site]]) -> list[list[tuple[Decision, Site]]]:
    """Return planned rewrites in their order, with those that follow one another in one graph in a row."""
    found: list[list[tuple[Decision, Site]]] = []
    for decision, site in planned:
        last = found[-1][-1][1] if found and _keeps_function(pass_) else None
        if last is not None and _place(last) == _place(site):
            found[-1].append((decision, site))
        else:
            found.append([(decision, site)])
    return found


def resolved(part: Site, choice: str | None) -> Site:
    """Return one of several sites with the lowering that it takes where `choice` is asked of all of them.

    That is its first where it has no such lowering.
    """
    first = next(iter(part.choices), None)
    return dataclasses.replace(part, choice=choice if choice in part.choices else first)


def classes_of(sites: Sequence[Site]) -> list[list[Site]]:
    """Return the sites with those that are alike together; where kinds are many, several kinds make one class."""
    classes: dict[Hashable, list[Site]] = {}
    for number, site in enumerate(sites):
        classes.setdefault(("one", number) if site.kind is None else ("kind", site.kind), []).append(site)
    alike, size = list(classes.values()), -(-len(classes) // _MOST_CLASSES) or 1
    return [[site for each in alike[first : first + size] for site in each] for first in range(0, len(alike), size)]

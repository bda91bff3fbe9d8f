"""Find what structured pruning removes: groups of coupled units, their scores, and how many of each go."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ....passes.contract import word_for
from ....passes.sites import Refusal, Site
from ....runtime.graphs import Capture
from ....tracing.program import Program
from ..dependency_groups import Group, Refused, coupling
from ..settings import Settings
from .choosing import choose, chosen_for_target
from .costs import Cost, DoesNotRun, cost_of
from .display_names import display_name
from .scores import NoScores, scores_of
from .sites import Chosen, sites_of

__all__ = ["find"]

_TAKEN_BYTES = 16
"""Strides of what `grouped_mm` multiplies are multiples of so many bytes."""


def find(program: Program, wanted: Settings) -> Iterator[Site | Refusal]:
    """Yield a site for the units that go of each group, and what is refused, like reasons together."""
    found = coupling(program)
    of_kind = [group for group in found.groups if group.kind in wanted.kinds]
    groups, left_out = _wanted(program, of_kind, wanted)
    yield from _refusals((*found.refused, *left_out))
    scores = scores_of(program, groups, wanted)
    scored = [(group, score) for group, score in zip(groups, scores, strict=True) if isinstance(score, Tensor)]
    unscored = [Refused(g.name, str(s)) for g, s in zip(groups, scores, strict=True) if isinstance(s, NoScores)]
    chosen, cost, failing = _chosen(program, scored, wanted)
    yield from _refusals((*unscored, *failing))
    if chosen:
        yield from display_name(program.model, chosen, list(sites_of(program, chosen)), wanted, cost)


def _chosen(
    program: Program, scored: Sequence[tuple[Group, Tensor]], wanted: Settings
) -> tuple[list[Chosen], Cost, list[Refused]]:
    """Return what is kept of each group, by which cost, and the groups without whose units the model does not run."""
    cost, failing = cost_of(program, wanted.target), list[Refused]()
    while scored:
        groups, scores = [group for group, _ in scored], [score for _, score in scored]
        try:
            multiples = [_multiple(program, group, wanted) for group in groups]
            return _for(wanted, groups, scores, multiples, cost), cost, failing
        except DoesNotRun as signal:
            reasons = signal.reasons
            failing += [Refused(name, reason) for name, reason in reasons.items()]
            scored = [(group, score) for group, score in scored if group.name not in reasons]
    return [], cost, failing


def _for(
    wanted: Settings, groups: Sequence[Group], scores: Sequence[Tensor], multiples: Sequence[int], cost: Cost
) -> list[Chosen]:
    def at(share: float) -> list[Chosen]:
        return choose(groups, scores, share, wanted, multiples)

    if wanted.target == "units":
        return at(wanted.amount)
    return chosen_for_target(wanted.amount, at, cost, wanted.target)


def _multiple(program: Program, group: Group, wanted: Settings) -> int:
    """Return of how many units a multiple stays: `grouped_mm` takes stacked matrices with rows of whole 16 bytes."""
    multiple = wanted.round_to
    for cut in group.cuts if group.kind not in ("heads", "experts") else ():
        owner = cut.tensor.rpartition(".")[0]
        if cut.dim and owner in program.captures and _multiplies_groups(program.captures[owner]):
            each = _TAKEN_BYTES // program.model.get_parameter(cut.tensor).element_size()
            multiple = math.lcm(multiple, each)
    return multiple


def _multiplies_groups(capture: Capture) -> bool:
    nodes = (node for each in capture.specializations for node in each.graph.nodes)
    return any("grouped_mm" in getattr(node.target, "__name__", "") for node in nodes)


def _wanted(program: Program, groups: Sequence[Group], wanted: Settings) -> tuple[list[Group], list[Refused]]:
    """Return the groups that may be cut, and those that may not, with why."""
    taken: list[Group] = []
    refused: list[Refused] = []
    for group in groups:
        reason = _obstacle(program, group, wanted)
        if reason is None:
            taken.append(group)
        else:
            refused.append(Refused(group.name, reason))
    return taken, refused


def _obstacle(program: Program, group: Group, wanted: Settings) -> str | None:
    owners = dict.fromkeys(cut.tensor.rpartition(".")[0] for cut in group.cuts)
    word = next(filter(None, (word_for(wanted.keep, owner, program) for owner in owners)), None)
    if word is not None:
        return f"it has to keep its units: keep={word}"
    if group.router is not None:
        return _too_few(group, wanted)
    return "it has one unit only" if group.size < 2 else None


def _too_few(group: Group, wanted: Settings) -> str | None:
    """Return why so many experts cannot go: each token goes to several."""
    goes_to = f"each token goes to {group.least} of its {group.size} experts"
    if group.size <= group.least:
        return goes_to
    left = group.size - round(wanted.amount * group.size)
    is_exact = wanted.scope == "layer" and wanted.target == "units"
    return f"{goes_to}, and amount={wanted.amount:g} would leave {left}" if is_exact and left < group.least else None


def _refusals(refused: Sequence[Refused]) -> Iterator[Refusal]:
    """Yield one refusal for each reason; what is as it has to be is none."""
    layers: dict[str, list[str]] = defaultdict(list)
    for each in refused:
        if not each.by_design:
            layers[each.reason].append(each.layer)
    for reason, names in layers.items():
        others = "is 1 more layer" if len(names) == 2 else f"are {len(names) - 1} more layers"
        more = "" if len(names) == 1 else f" (so {others}: {_shown(names[1:])})"
        yield Refusal(f"{reason}{more}", at=names[0])


def _shown(names: Sequence[Any]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")

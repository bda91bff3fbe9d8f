"""Find what structured pruning removes: groups of coupled units, their scores, and how many of each go."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ....errors import UsageError
from ....passes.sites import Refusal, Site
from ....suggest import did_you_mean
from ....tracing.program import Program
from ....tracing.values import tensors_by_name
from ..coupling import Group, Refused, coupling
from .choosing import choose, chosen_for_target
from .costs import cost_of
from .scores import NoScores, scores_of
from .selection import Selection
from .sites import Chosen, sites_of

__all__ = ["check", "find"]


def check(model: nn.Module, wanted: Selection) -> None:
    """Refuse, before any work, names of layers that the model does not have, and weights that are no numbers.

    Raises:
        UsageError: with the nearest names.
    """
    modules = [name for name, _ in model.named_modules() if name]
    for pattern in wanted.keep:
        if not fnmatch.filter(modules, pattern):
            raise UsageError(f"keep={pattern!r}: the model has no such module{did_you_mean(pattern, modules)}")
    for name, tensor in tensors_by_name(model).items():
        if tensor.is_floating_point() and not tensor.is_meta and bool(tensor.isnan().any()):
            raise UsageError(f"'{name}' holds NaN: nothing can be said of what its units count; load sound weights")


def find(program: Program, wanted: Selection) -> Iterator[Site | Refusal]:
    """Yield a site for the units that go of each group, and what is refused, like reasons together."""
    found = coupling(program)
    groups, left_out = _wanted(found.groups, wanted)
    yield from _refusals((*found.refused, *left_out))
    scores = scores_of(program, groups, wanted)
    scored = [(group, score) for group, score in zip(groups, scores, strict=True) if isinstance(score, Tensor)]
    unscored = [Refused(g.name, str(s)) for g, s in zip(groups, scores, strict=True) if isinstance(s, NoScores)]
    yield from _refusals(unscored)
    if scored:
        yield from sites_of(program, _chosen(program, *map(list, zip(*scored, strict=True)), wanted))  # pyright: ignore


def _chosen(program: Program, groups: Sequence[Group], scores: Sequence[Tensor], wanted: Selection) -> list[Chosen]:
    if wanted.target == "units":
        return choose(groups, scores, wanted.amount, wanted)
    cost = cost_of(program, wanted.target)
    return chosen_for_target(wanted.amount, lambda share: choose(groups, scores, share, wanted), cost, wanted.target)


def _wanted(groups: Sequence[Group], wanted: Selection) -> tuple[list[Group], list[Refused]]:
    """Return the groups that may be cut, and those that may not, with why."""
    taken: list[Group] = []
    refused: list[Refused] = []
    for group in groups:
        reason = _obstacle(group, wanted)
        if reason is None:
            taken.append(group)
        else:
            refused.append(Refused(group.name, reason))
    return taken, refused


def _obstacle(group: Group, wanted: Selection) -> str | None:
    for pattern in wanted.keep:
        if any(_is_in(cut.tensor.rpartition(".")[0], pattern) for cut in group.cuts):
            return f"keep={pattern!r}"
    if group.replaced:
        return f"the code of '{group.replaced[0]}' is torch's own and takes one width only"
    if group.size < 2:
        return "it has one unit only"
    return None


def _is_in(module: str, pattern: str) -> bool:
    parts = module.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))


def _refusals(refused: Sequence[Refused]) -> Iterator[Refusal]:
    """Yield one refusal for each reason; what is as it has to be is none."""
    layers: dict[str, list[str]] = defaultdict(list)
    for each in refused:
        if not each.by_design:
            layers[each.reason].append(each.layer)
    for reason, names in layers.items():
        more = "" if len(names) == 1 else f" (so are {len(names) - 1} more layers: {_shown(names[1:])})"
        yield Refusal(f"{reason}{more}", at=names[0])


def _shown(names: Sequence[Any]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")

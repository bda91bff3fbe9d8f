"""Which units are kept: the ranking of scores, in each group or over all, until enough is gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from ....errors import BudgetError
from ..dependency_groups import Group
from ..settings import Units
from .sites import Chosen

__all__ = ["choose", "chosen_for_target"]

_STEPS = {"latency": 6}
"""So often a share is halved on the way to a target: for what is measured, to one in 64."""

_EXACT_STEPS = 12
"""For what is counted, to one in four thousand."""

_CLOSE = 0.005
"""A target that is met within this share of the whole is met."""


def choose(
    groups: Sequence[Group], scores: Sequence[Tensor], share: float, wanted: Units, multiples: Sequence[int] = ()
) -> list[Chosen]:
    """Return what is kept where `share` of the units goes; of each group a multiple of so many, or of `round_to`.
    Raises BudgetError if nothing would be left in a layer.
    """
    counts = _counts_in_all(groups, scores, share) if wanted.scope == "global" else _counts_in_each(groups, share)
    found: list[Chosen] = []
    multiples = multiples or [wanted.round_to] * len(groups)
    for group, score, count, multiple in zip(groups, scores, counts, multiples, strict=True):
        count = _rounded(count, group, multiple)
        kept = score.argsort(descending=True, stable=True)[:count]
        found.append(Chosen(group, tuple(sorted(_numbers_in(kept)))))
    return found


def _counts_in_each(groups: Sequence[Group], share: float) -> list[int]:
    left = [group.size - round(share * group.size) for group in groups]
    counts = [
        max(count, group.least) if group.kind == "experts" else count for group, count in zip(groups, left, strict=True)
    ]
    empty = next((group for group, count in zip(groups, counts, strict=True) if not count), None)
    if empty is not None:
        raise BudgetError(
            f"amount={share:g} leaves nothing in '{empty.name}', which has {empty.size} {empty.kind}; "
            f"give a smaller amount, or keep it: keep=[{empty.name}]"
        )
    return counts


def _counts_in_all(groups: Sequence[Group], scores: Sequence[Tensor], share: float) -> list[int]:
    """Return how many units each group keeps where the weakest of all go; the strongest of each group stay."""
    owners = torch.cat([torch.full((group.size,), number) for number, group in enumerate(groups)])
    every = torch.cat(list(scores))
    left = [group.size for group in groups]
    gone = round(share * len(every))
    for number in _numbers_in(owners[every.argsort(stable=True)]):
        if gone and left[number] > groups[number].least:
            left[number] -= 1
            gone -= 1
    return left


def _numbers_in(tensor: Tensor) -> list[int]:
    """Return the elements of a tensor of whole numbers; torch declares no type for them."""
    return cast("list[int]", tensor.tolist())


def _rounded(count: int, group: Group, multiple: int) -> int:
    """Return the nearest multiple, at least one of it; heads and experts are few, and not rounded."""
    if multiple == 1 or group.kind in ("heads", "experts") or count == group.size:
        return count
    return min(group.size, max(multiple, round(count / multiple) * multiple))


def chosen_for_target(
    amount: float, at: Callable[[float], list[Chosen]], cost: Callable[[Sequence[Chosen]], float], what: str
) -> list[Chosen]:
    """Return what is kept where `amount` of a cost goes, which `what` names: shares of units are tried, by halving.
    Raises BudgetError if the cost cannot be brought down so far.
    """
    whole = cost(at(0.0))
    low, high, best = 0.0, 1.0, at(0.0)
    nearest, least = amount, 0.0
    for _ in range(_STEPS.get(what, _EXACT_STEPS)):
        share = (low + high) / 2
        try:
            found = at(share)
        except BudgetError:
            high = share
            continue
        gone = 1 - cost(found) / whole
        least = max(least, gone)
        if abs(gone - amount) < nearest:
            nearest, best = abs(gone - amount), found
        if abs(gone - amount) < _CLOSE:
            break
        low, high = (share, high) if gone < amount else (low, share)
    if least < amount - 0.02:
        raise BudgetError(f"amount={amount:g} of the {what} cannot go; all that can be pruned is {least:.2f} of them")
    return best

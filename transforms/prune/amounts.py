"""How many units go: a share of each group or of all, or as many as a target needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ...errors import BudgetError
from ...runtime.record import Decision
from .dependency_groups import Group
from .options import Options
from .sites import Chosen

__all__ = ["Ranking", "check_target", "chosen_for_target"]

_MET = 0.02
"""A target that is met within this share of the whole is met."""

_CLOSE = 0.005
"""Within this share there is no need to look for a nearer one."""

_STEPS, _MEASURED_STEPS = 12, 6
"""So often a share is halved on the way to a target: to one in four thousand, or in 64 where the cost is measured."""

_REFINED = 4
"""So many groups with large steps are left behind on the way to a target."""


@dataclass(frozen=True)
class Ranking:
    """Groups of units with the units' scores, and of how many a multiple is kept in each."""

    groups: Sequence[Group]
    scores: Sequence[Tensor]
    wanted: Options
    multiples: Sequence[int]  # of each group

    def choose(self, share: float) -> list[Chosen]:
        """Return what is kept where `share` of the units goes; BudgetError: nothing is left in a layer."""
        return self.kept(self.counts(share))

    def kept(self, counts: Sequence[int]) -> list[Chosen]:
        """Return the strongest of each group, as many as is said."""
        found: list[Chosen] = []
        for group, score, count in zip(self.groups, self.scores, counts, strict=True):
            strongest = score.argsort(descending=True, stable=True)[:count]
            found.append(Chosen(group, tuple(sorted(_numbers_in(strongest)))))
        return found

    def counts(self, share: float) -> list[int]:
        """Return how many units each group keeps where `share` of them goes, in multiples."""
        is_global = self.wanted.scope == "global"
        left = _left_of_all(self.groups, self.scores, share) if is_global else self._left_of_each(share)
        return [
            count if multiple == 1 or count == group.size else _rounded(count, multiple, group.size)
            for group, count, multiple in zip(self.groups, left, self.steps, strict=True)
        ]

    @property
    def steps(self) -> list[int]:
        """Return of how many units each group keeps a multiple; of units that are few it is one."""
        many = ("channels", "hidden")
        return [multiple if g.kind in many else 1 for g, multiple in zip(self.groups, self.multiples, strict=True)]

    def _left_of_each(self, share: float) -> list[int]:
        shares = [share if self.wanted.ratios is None else self.wanted.share_of(group.name) for group in self.groups]
        counts = [group.size - round(each * group.size) for group, each in zip(self.groups, shares, strict=True)]
        # A target may need more than a small layer can give.
        may_stop = self.wanted.target != "units"
        counts = [
            max(count, group.least) if may_stop or group.kind == "experts" else count
            for group, count in zip(self.groups, counts, strict=True)
        ]
        left = zip(self.groups, counts, shares, strict=True)
        empty, each = next(((group, each) for group, count, each in left if not count), (None, 0.0))
        if empty is not None:
            raise BudgetError(
                f"amount={each:g} leaves nothing in '{empty.name}', which has {empty.size} {empty.kind}; "
                f"give a smaller amount, or keep it: keep=[{empty.name}]"
            )
        return counts

    def between(self, more: Sequence[int], fewer: Sequence[int]) -> list[list[int]]:
        """Return the counts on the way from more units to fewer, one group one step at a time, all groups evenly."""
        moves: list[tuple[float, int, int]] = []
        for number, (start, end, step) in enumerate(zip(more, fewer, self.steps, strict=True)):
            way = list(_downwards(start, end, step))
            moves += [((place + 1) / len(way), number, count) for place, count in enumerate(way)]
        found = [list(more)]
        for _, number, count in sorted(moves):
            found.append([*found[-1][:number], count, *found[-1][number + 1 :]])
        return found


def _rounded(count: int, multiple: int, size: int) -> int:
    return min(size, max(multiple, round(count / multiple) * multiple))


def _downwards(start: int, end: int, step: int) -> Iterator[int]:
    """Yield the multiples of a step below one number, down to another one."""
    while start > end:
        start = max(end, (start - 1) // step * step)
        yield start


def _left_of_all(groups: Sequence[Group], scores: Sequence[Tensor], share: float) -> list[int]:
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


def chosen_for_target(ranking: Ranking, cost: Callable[[Sequence[Chosen]], float]) -> list[Chosen]:
    """Return what is kept where the amount of a cost goes; BudgetError: it is not met.

    Shares of the units are halved first; between the two nearest ones, groups give one more unit one after another.
    """
    amount, what = ranking.wanted.amount, ranking.wanted.target
    is_measured = what == "latency"
    tried = _Tried(ranking, cost, amount)
    low, high = 0.0, 1.0
    for _ in range(_MEASURED_STEPS if is_measured else _STEPS):
        share = (low + high) / 2
        less = tried.gone(ranking.counts(share)) < amount
        if tried.is_met(_CLOSE):
            return ranking.kept(tried.nearest)
        low, high = (share, high) if less else (low, share)
    if not is_measured and tried.most >= amount:
        tried.refine(ranking.counts(low), ranking.counts(high))
    is_met = tried.most >= amount - _MET if is_measured else tried.is_met(_MET)  # no two measurements are the same
    if not is_met:
        raise BudgetError(tried.explained(what))
    return ranking.kept(tried.nearest)


class _Tried:
    """What was reached so far."""

    def __init__(self, ranking: Ranking, cost: Callable[[Sequence[Chosen]], float], amount: float) -> None:
        self._ranking, self._cost, self._amount = ranking, cost, amount
        whole = [group.size for group in ranking.groups]
        self._whole = cost(ranking.kept(whole))
        self.nearest, self.most, self._below, self._above = whole, 0.0, 0.0, 1.0
        self._distance = amount

    def gone(self, counts: list[int]) -> float:
        """Return the share of the cost that is gone with so many units left."""
        gone = 1 - self._cost(self._ranking.kept(counts)) / self._whole
        self.most = max(self.most, gone)
        if gone <= self._amount:
            self._below = max(self._below, gone)
        else:
            self._above = min(self._above, gone)
        if abs(gone - self._amount) < self._distance:
            self._distance, self.nearest = abs(gone - self._amount), counts
        return gone

    def is_met(self, within: float) -> bool:
        return self._distance <= within

    def refine(self, more: list[int], fewer: list[int]) -> None:
        """Let groups give one more unit one after another; where one makes too large a step, the others go on."""
        stay = set[int]()
        while not self.is_met(_MET) and len(stay) < min(_REFINED, len(self._ranking.groups)):
            ways = self._ranking.between(more, fewer)
            place = self._halve(ways)
            if place + 1 == len(ways):
                return
            more = ways[place]
            stay.add(next(n for n, pair in enumerate(zip(more, ways[place + 1], strict=True)) if pair[0] != pair[1]))
            least = self._ranking.counts(1.0)
            fewer = [more[n] if n in stay else min(more[n], count) for n, count in enumerate(least)]

    def _halve(self, ways: Sequence[list[int]]) -> int:
        """Try what lies between two choices, the nearer half each time; return the last one that is too little."""
        low, high = 0, len(ways)
        while high - low > 1 and not self.is_met(_CLOSE):
            middle = (low + high) // 2
            low, high = (middle, high) if self.gone(ways[middle]) < self._amount else (low, middle)
        return low

    def explained(self, what: str) -> str:
        if self.most < self._amount:
            return f"amount={self._amount:g} of the {what} cannot be removed; at most {self.most:.3g} of them can"
        return (
            f"amount={self._amount:g} of the {what} cannot be met: whole units, in multiples, remove {self._below:.3g} "
            f"or {self._above:.3g}; give one of these, or a smaller round_to"
        )


def check_target(wanted: Options, decisions: Sequence[Decision]) -> None:
    """Raise BudgetError where sites were undone, and a share of the parameters or operations is missed for that."""
    found = [(decision, cast("dict[str, Any]", decision.site)["data"]) for decision in decisions if decision.site]
    lost = [(decision, data) for decision, data in found if decision.status != "applied"]
    costs: Any = next((data["costs"] for _, data in found if "costs" in data), None)
    if not lost or costs is None or wanted.target not in ("parameters", "flops"):
        return
    before, after = costs[wanted.target]
    saved: list[Any] = [data.get("saves", {}).get(wanted.target) for _, data in lost]
    reached = None if None in saved else float(1 - (after + sum(saved)) / before)
    if reached is not None and abs(reached - wanted.amount) <= _MET:
        return
    share = "fewer" if reached is None else f"{reached:.3g}"
    why = "; ".join(f"{decision.label}: {decision.reason}" for decision, _ in lost[:3])
    names = ", ".join(decision.label for decision, _ in lost)
    raise BudgetError(
        f"amount={wanted.amount:g} of the {wanted.target} is missed: {share} of them went, as {len(lost)} of "
        f"{len(found)} sites were undone ({why}); with keep=[{names}] others go in their place"
    )

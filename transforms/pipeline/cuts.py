"""Where a graph is cut into stages: balanced by cost, and where few bytes cross."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import fx, nn

from ...runtime.guards import require
from .costs import NodeFacts, ValueKind

__all__ = ["BALANCE", "Line", "Stages", "line_of"]

BALANCE = 0.05
"""A stage may cost so much more than the mean where fewer bytes cross then."""

_ROUNDED = 1 + 1e-9
"""Sums of costs differ by at most this factor where they are added in another order."""

_PICKS = (getattr, operator.getitem, len, require)
"""What only picks from a value, or checks it: it stays with that value."""


@dataclass(frozen=True)
class Stages:
    """A division of a line into stages."""

    starts: tuple[int, ...]  # position of the first item of each stage
    costs: tuple[float, ...]  # of each stage
    crossing: int  # bytes that cross, over all cuts

    @property
    def imbalance(self) -> float:
        """Return by which share the slowest stage costs more than the mean."""
        mean = sum(self.costs) / len(self.costs)
        return max(self.costs) / mean - 1 if mean else 0.0


@dataclass(frozen=True)
class Line:
    """The nodes of an opened graph in the order in which they run."""

    items: Sequence[fx.Node]  # nodes that belong to one stage each
    place: Mapping[fx.Node, int]  # node -> position of the item that it goes with; of all that is in one stage only
    costs: Sequence[float]  # of each item
    crossing: Sequence[int | None]  # bytes that cross a cut before an item; None where there can be no cut

    def cut(self, stages: int) -> Stages | None:
        """Return the division that crosses the fewest bytes among those with nearly the best balance, or None."""
        sums = [0.0, *accumulate(self.costs)]
        cuts = [number for number, crossing in enumerate(self.crossing) if crossing is not None and number]
        slowest = _slowest(sums, cuts, stages)
        if slowest is None:
            return None
        limit = max(slowest, sums[-1] / stages * (1 + BALANCE))
        starts = _fewest_bytes(sums, cuts, stages, limit * _ROUNDED, self.crossing)
        ends = (*starts[1:], len(self.items))
        costs = tuple(sums[end] - sums[start] for start, end in zip(starts, ends, strict=True))
        return Stages(starts, costs, sum(self.crossing[start] or 0 for start in starts[1:]))

    def straddling(self, stages: int) -> list[fx.Node]:
        """Return the items inside which an ideal division would cut."""
        sums = [0.0, *accumulate(self.costs)]
        ideal = [sums[-1] * stage / stages for stage in range(1, stages)]
        pairs = zip(self.items, sums, sums[1:], strict=False)
        return [item for item, start, end in pairs if any(start < point < end for point in ideal)]


def _slowest(sums: Sequence[float], cuts: Sequence[int], stages: int) -> float | None:
    """Return the cost of the slowest stage in the best division, or None if there is none."""
    end = len(sums) - 1
    places, best = [0], [0.0]  # where the next stage may start, and the slowest of those before it: neither ever falls
    for stage in range(1, stages + 1):
        # The later the last stage starts, the less it costs: it is best where it costs what the slowest before it does.
        meets = [before + sums[start] for start, before in zip(places, best, strict=True)]
        found: list[tuple[int, float]] = []
        for stop in [end] if stage == stages else cuts:
            count = bisect_left(places, stop)
            middle = bisect_left(meets, sums[stop], 0, count)
            near = range(max(0, middle - 1), min(middle + 1, count))
            costs = [max(best[number], sums[stop] - sums[places[number]]) for number in near]
            found += [(stop, min(costs))] if costs else []
        places, best = [stop for stop, _ in found], [cost for _, cost in found]
    return best[0] if best else None


def _fewest_bytes(
    sums: Sequence[float], cuts: Sequence[int], stages: int, limit: float, crossing: Sequence[int | None]
) -> tuple[int, ...]:
    """Return where the stages start in the division that crosses the fewest bytes; of such, in the most even one."""
    end, reached = len(sums) - 1, [sums[cut] for cut in cuts]
    best: dict[int, tuple[int, float, tuple[int, ...]]] = {0: (0, 0.0, ())}
    for stage in range(1, stages + 1):
        found: dict[int, tuple[int, float, tuple[int, ...]]] = {}
        starts = list(best)  # in order
        least = sums[-1] - (stages - stage) * limit * _ROUNDED  # else the stages that are left could not hold the rest
        for stop in [end] if stage == stages else cuts[bisect_left(reached, least) :]:
            known: tuple[int, float, tuple[int, ...]] | None = None
            for start in reversed(starts[: bisect_left(starts, stop)]):
                cost = sums[stop] - sums[start]
                if cost > limit:  # those before it cost more
                    break
                size, squares, before = best[start]
                bytes_, even = size + (0 if stop == end else crossing[stop] or 0), squares + cost * cost
                if known is None or (bytes_, even) <= known[:2]:
                    mine = (bytes_, even, (*before, start))
                    known = mine if known is None else min(known, mine)
            if known is not None:
                found[stop] = known
        best = found
    return best[end][2]


def line_of(graph: fx.Graph, seen: Mapping[fx.Node, NodeFacts], model: nn.Module) -> Line:
    """Return the nodes of an opened graph as a line that can be cut."""
    items: list[fx.Node] = []
    place: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if (
            node.op in ("placeholder", "output", "get_attr")
            or seen[node].repeatable
            or seen[node].repeatable_with_plain
        ):
            continue
        stays = _stays_with(node, seen)
        if stays:
            place[node] = max(place[source] for source in stays)
        else:
            place[node] = len(items)
            items.append(node)
    return Line(items, place, [seen[item].cost for item in items], _crossing(graph, items, place, seen, model))


def _stays_with(node: fx.Node, seen: Mapping[fx.Node, NodeFacts]) -> list[fx.Node]:
    """Return the values whose stage a node belongs to, since it picks from them; none if it is an item itself."""
    if node.op != "call_function" or node.target not in _PICKS:
        return []
    sources = [source for source in node.all_input_nodes if not seen[source].repeatable and source.op != "get_attr"]
    picks = node.target is require or any(seen[source].kind is ValueKind.OTHER for source in sources)
    return sources if picks and not any(seen[source].repeatable_with_plain for source in sources) else []


def _crossing(
    graph: fx.Graph,
    items: Sequence[fx.Node],
    place: Mapping[fx.Node, int],
    seen: Mapping[fx.Node, NodeFacts],
    model: nn.Module,
) -> list[int | None]:
    crossing: list[int | None] = [0] * len(items)

    def forbid(first: int, last: int) -> None:
        crossing[first + 1 : last + 1] = [None] * (last - first)

    for node, first in place.items():
        last = max((place.get(user, len(items) - 1) for user in node.users), default=first)
        if seen[node].kind is ValueKind.OTHER:
            forbid(first, last)
        written = seen[node].last_writer
        if written is not None and written in place:
            forbid(first, place[written])
        for position in range(first + 1, last + 1):
            before = crossing[position]
            crossing[position] = None if before is None else before + seen[node].size
    for calls in _calls_of_stateful(graph, place, model):
        forbid(min(calls), max(calls))
    return crossing


def _calls_of_stateful(graph: fx.Graph, place: Mapping[fx.Node, int], model: nn.Module) -> list[list[int]]:
    """Return where modules are called that are called twice and must be on one stage; plain layers may be tied."""
    calls: dict[nn.Module, list[int]] = {}
    for node in graph.find_nodes(op="call_module"):
        module: Any = model.get_submodule(str(node.target))
        if node in place and next(module.parameters(), None) is not None:
            calls.setdefault(module, []).append(place[node])
    twice = [(module, found) for module, found in calls.items() if len(found) > 1]
    return [found for module, found in twice if any(module.children()) or next(module.buffers(), None) is not None]

"""Look into a model as far as it takes to cut it into even stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ...errors import MatchFailure
from ...tracing.program import Program
from .costs import Cost, Kind, NodeFacts, observed
from .cuts import BALANCE, Line, Stages, line_of
from .opening import Opened, depends_on_mode, opened_graph, why_closed

__all__ = ["Found", "described", "find_stages", "unpackable"]


@dataclass(frozen=True)
class Found:
    """Where a model is to be cut.

    Attributes:
        opened: its graph.
        seen: what is known of each node.
        line: the nodes in order.
        stages: the division.
    """

    opened: Opened
    seen: Mapping[fx.Node, NodeFacts]
    line: Line
    stages: Stages

    @property
    def stage_of(self) -> dict[fx.Node, int]:
        """Return the stage of each node that belongs to one."""
        return {
            node: sum(place >= start for start in self.stages.starts) - 1 for node, place in self.line.place.items()
        }

    def data(self) -> dict[str, Any]:
        """Return, as plain values, what every rank needs to build its part: see `Layout.of`."""
        return described(self.opened, self.seen, self.stage_of, len(self.stages.starts))


def described(
    opened: Opened, seen: Mapping[fx.Node, NodeFacts], stage_of: Mapping[fx.Node, int], count: int
) -> dict[str, Any]:
    """Return a division of an opened graph as plain values."""
    return {
        "count": count,
        "opened": dict(opened.chosen),
        "unpacked": dict(opened.unpacked),
        "stages": {node.name: stage for node, stage in stage_of.items()},
        "repeated": [node.name for node, each in seen.items() if each.repeatable and node.op != "placeholder"],
        "late": [node.name for node, each in seen.items() if each.repeatable_when_told],
        "plain": [node.name for node, each in seen.items() if each.kind is Kind.PLAIN],
    }


def unpackable(opened: Opened, seen: Mapping[fx.Node, NodeFacts]) -> dict[str, int]:
    """Return the nodes that give tuples which are not unpacked yet, and their lengths."""
    lengths = {node.name: each.tuple_length for node, each in seen.items() if node.name not in opened.unpacked}
    return {name: length for name, length in lengths.items() if length}


def find_stages(program: Program, stages: int, cost: Cost) -> Found:
    """Return where to cut a model into stages.

    Modules are looked into, the one around an ideal cut first, until the slowest stage is within `BALANCE` of the mean
    or nothing is left to look into.

    Raises:
        MatchFailure: it cannot be cut into so many.
    """
    chosen, unpacked, model = {"": 0}, dict[str, int](), program.model
    best: Found | None = None
    while True:
        try:
            opened = opened_graph(model, chosen, unpacked)
        except MatchFailure:
            if best is None:
                raise
            return best
        seen, fits = observed(opened, model, program.whole_calls[0], cost, training=program.training)
        if unpackable(opened, seen):
            unpacked |= unpackable(opened, seen)
            continue
        line = line_of(opened.graph, seen, model)
        division = line.cut(stages)
        if division is not None and (best is None or division.imbalance < best.stages.imbalance):
            best = Found(opened, seen, line, division)
        inside = _to_open(opened, line, fits, stages, model)
        if (best is not None and best.stages.imbalance <= BALANCE) or not inside:
            break
        chosen = {**chosen, **inside}
    if best is None:
        raise MatchFailure(
            f"the model cannot be cut into {stages} stages: {len(line.items)} groups of operations can be separated; "
            "values that are no tensors, writes in place and modules that are called twice keep the others together"
        )
    return best


def _to_open(
    opened: Opened, line: Line, fits: Mapping[str, list[int]], stages: int, model: nn.Module
) -> dict[str, int]:
    """Return the modules to look into next: those inside which an ideal division would cut; else the costliest."""
    calls = [(node, opened.paths[node.name]) for node in line.items if opened.paths.get(node.name) in fits]
    open_ = {node: path for node, path in calls if why_closed(model.get_submodule(str(node.target))) is None}
    ideal = [node for node in line.straddling(stages) if node in open_]
    if not ideal and line.cut(stages) is None:
        costs = dict(zip(line.items, line.costs, strict=True))
        ideal = sorted(open_, key=lambda node: -costs[node])[:1]
    # Where the modes differ, each needs a way of its own through the module: such a one is looked into last.
    even = [node for node in ideal if not depends_on_mode(model.get_submodule(str(node.target)))]
    return {open_[node]: fits[open_[node]][0] for node in even or ideal}

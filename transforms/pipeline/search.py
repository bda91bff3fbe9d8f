"""Look into a model as far as it takes to cut it into even stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ...errors import MatchFailure
from ...tracing.program import Program
from .costs import Cost, Kind, Seen, measured
from .cuts import BALANCE, Line, Stages, line_of
from .opening import Opened, opened_graph, why_closed

__all__ = ["Found", "find_stages"]


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
    seen: Mapping[fx.Node, Seen]
    line: Line
    stages: Stages

    def data(self) -> dict[str, Any]:
        """Return, as plain values, what every rank needs to build its part: see `Layout.of`."""
        stage_of = {node.name: self._stage(place) for node, place in self.line.place.items()}
        return {
            "opened": dict(self.opened.chosen),
            "unpacked": dict(self.opened.unpacked),
            "stages": stage_of,
            "repeated": [node.name for node, seen in self.seen.items() if seen.repeatable and node.op != "placeholder"],
            "plain": [node.name for node, seen in self.seen.items() if seen.kind is Kind.PLAIN],
            "costs": list(self.stages.costs),
            "crossing": self.stages.crossing,
        }

    def _stage(self, place: int) -> int:
        return sum(place >= start for start in self.stages.starts) - 1


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
        seen, fits = measured(opened, model, program.inputs[0], cost, training=program.training)
        tuples = {node.name: each.length for node, each in seen.items() if each.length and node.name not in unpacked}
        if tuples:
            unpacked |= tuples
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
            f"the model cannot be cut into {stages} stages: {len(line.items)} operations can be told apart, and values "
            "that are no tensors, writes in place and modules that are called twice keep some of them together"
        )
    return best


def _to_open(opened: Opened, line: Line, fits: Mapping[str, int], stages: int, model: nn.Module) -> dict[str, int]:
    """Return the modules to look into next: those inside which an ideal division would cut; else the costliest."""
    calls = [(node, opened.paths[node.name]) for node in line.items if opened.paths.get(node.name) in fits]
    open_ = {node: path for node, path in calls if why_closed(model.get_submodule(str(node.target))) is None}
    ideal = [node for node in line.straddling(stages) if node in open_]
    costs = dict(zip(line.items, line.costs, strict=True))
    costliest = sorted(open_, key=lambda node: -costs[node])[:1]
    return {open_[node]: fits[open_[node]] for node in ideal or costliest}

"""Which nodes each stage runs, what it is sent and sends on, and which tensors it holds."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from ...compat import all_modules
from ...errors import PlanError
from ...runtime.values import all_tensors
from .opening import Holds, OpenedModel, opened_graph

__all__ = ["Layout", "StagePart"]


@dataclass(frozen=True)
class StagePart:
    """What one stage does."""

    number: int  # of the stage
    nodes: Sequence[fx.Node]  # what it runs, in order
    received: Sequence[fx.Node]  # values that come from the stage before, in order
    sent: Sequence[fx.Node]  # values that go on to the next stage, in order; some only pass through
    result: Any = None  # what the last stage returns: a structure in which nodes stand for values


@dataclass(frozen=True)
class Layout:
    """A model, divided into stages."""

    opened: OpenedModel
    parts: Sequence[StagePart]
    repeated: Sequence[fx.Node]  # hangs on inputs and buffers alone: computed wherever needed
    plain: frozenset[fx.Node]  # the values that are no tensors

    @classmethod
    def of(cls, model: nn.Module, data: Mapping[str, Any]) -> Layout:
        """Return the layout that `CutRoute.data` describes, or raise PlanError where it is of another model."""
        opened = opened_graph(model, data["opened"], data["unpacked"])
        by_name = {node.name: node for node in opened.graph.nodes}
        missing = [name for name in (*data["stages"], *data["repeated"]) if name not in by_name]
        if missing:
            raise PlanError(f"the plan's stages have '{missing[0]}', which this model does not have")
        stage_of: dict[fx.Node, int] = {by_name[name]: stage for name, stage in data["stages"].items()}
        needs = _Needs(opened.graph, stage_of, {by_name[name] for name in data["late"]}, data["count"])
        plain = frozenset(by_name[name] for name in data["plain"] if name in by_name)
        parts = [needs.part(number) for number in range(data["count"])]
        return cls(opened, parts, [by_name[name] for name in data["repeated"]], plain)

    def forget_unreadable(self) -> None:
        """Drop the guards of modules that are looked into which read what is on another rank."""
        self.opened.holds.forget_unreadable()
        for node in self.opened.graph.nodes:
            if isinstance(node.target, Holds):
                node.target.forget_unreadable()

    def tensors(self, model: nn.Module, parts: Sequence[StagePart] | None = None) -> dict[int, dict[int, Tensor]]:
        """Return, by stage, the parameters and buffers that it needs, by id; of some `parts`, or of all."""
        everywhere = {node for node in self.repeated if node.op in ("get_attr", "call_module")}
        return {
            part.number: {
                id(tensor): tensor for node in (*part.nodes, *everywhere) for tensor in _tensors_of(node, model)
            }
            for part in (self.parts if parts is None else parts)
        }

    def called(self, model: nn.Module) -> dict[nn.Module, set[int]]:
        """Return, for each module that is called, by which stages."""
        found: dict[nn.Module, set[int]] = {}
        for part in self.parts:
            for node in (*part.nodes, *self.repeated):
                if node.op == "call_module":
                    found.setdefault(model.get_submodule(str(node.target)), set()).add(part.number)
        return found


class _Needs:
    """Which stages need what; `late` nodes are computed by each stage that needs them."""

    def __init__(self, graph: fx.Graph, stage_of: Mapping[fx.Node, int], late: Collection[fx.Node], count: int) -> None:
        self.graph, self.stage_of, self.late, self.count = graph, stage_of, late, count
        self._of: dict[fx.Node, set[int]] = {}
        for node in reversed(graph.nodes):
            self._of[node] = {stage for user in node.users for stage in self._run_in(user)}

    def _run_in(self, node: fx.Node) -> set[int]:
        if node.op == "output":
            return {self.count - 1}
        return {self.stage_of[node]} if node in self.stage_of else self._of[node]

    def part(self, number: int) -> StagePart:
        own = {node for node, stage in self.stage_of.items() if stage == number}
        own |= {node for node in self.late if number in self._of[node]}
        own |= {used for node in own for used in node.all_input_nodes if used.op == "get_attr"}
        nodes = [node for node in self.graph.nodes if node in own]
        result = self.graph.output_node().args[0] if number == self.count - 1 else None
        return StagePart(number, nodes, self._crossing(number), self._crossing(number + 1), result)

    def _crossing(self, stage: int) -> list[fx.Node]:
        """Return the values that are made before a stage and read by it or by a later one."""
        made = [node for node in self.graph.nodes if self.stage_of.get(node, self.count) < stage < self.count]
        return [node for node in made if max(self._of[node], default=-1) >= stage]


def _tensors_of(node: fx.Node, model: nn.Module) -> Iterable[Tensor]:
    if node.op == "call_module":
        return all_tensors(all_modules(model.get_submodule(str(node.target))))
    return [operator.attrgetter(str(node.target))(model)] if node.op == "get_attr" else []

"""Which nodes each stage runs, what it is sent and sends on, and which tensors it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from ...compat import own_buffers, own_parameters
from ...errors import PlanError
from .opening import Holds, Opened, opened_graph

__all__ = ["Layout", "Part"]


@dataclass(frozen=True)
class Part:
    """What one stage does.

    Attributes:
        number: of the stage.
        nodes: what it runs, in order.
        received: values that come from the stage before, in order.
        sent: values that go on to the next stage, in order; some only pass through.
        result: what the last stage returns: a structure in which nodes stand for values.
    """

    number: int
    nodes: Sequence[fx.Node]
    received: Sequence[fx.Node]
    sent: Sequence[fx.Node]
    result: Any = None


@dataclass(frozen=True)
class Layout:
    """A model, divided into stages.

    Attributes:
        opened: the model as one graph.
        parts: the stages.
        repeated: what hangs on inputs and buffers alone: computed by every stage that needs it, and checked on all.
        plain: the values that are no tensors.
    """

    opened: Opened
    parts: Sequence[Part]
    repeated: Sequence[fx.Node]
    plain: frozenset[fx.Node]

    @classmethod
    def of(cls, model: nn.Module, data: Mapping[str, Any]) -> Layout:
        """Return the layout that `Found.data` describes.

        Raises:
            PlanError: it is of another model.
        """
        opened = opened_graph(model, data["opened"], data["unpacked"])
        by_name = {node.name: node for node in opened.graph.nodes}
        missing = [name for name in (*data["stages"], *data["repeated"]) if name not in by_name]
        if missing:
            raise PlanError(f"the plan divides a model with '{missing[0]}' into stages, which this one has not")
        stage_of: dict[fx.Node, int] = {by_name[name]: stage for name, stage in data["stages"].items()}
        repeated = [by_name[name] for name in data["repeated"]]
        plain = frozenset(by_name[name] for name in data["plain"] if name in by_name)
        count = max(stage_of.values()) + 1
        parts = [_part(opened.graph, stage_of, number, count) for number in range(count)]
        return cls(opened, parts, repeated, plain)

    def forget_unreadable(self) -> None:
        """Drop the guards of modules that are looked into which read what is on another rank."""
        self.opened.holds.forget_unreadable()
        for node in self.opened.graph.nodes:
            if isinstance(node.target, Holds):
                node.target.forget_unreadable()

    def tensors(self, model: nn.Module) -> dict[int, dict[int, Tensor]]:
        """Return, by stage, the parameters and buffers that it needs, by id."""
        everywhere = {node for node in self.repeated if node.op in ("get_attr", "call_module")}
        return {
            part.number: {
                id(tensor): tensor for node in (*part.nodes, *everywhere) for tensor in _tensors_of(node, model)
            }
            for part in self.parts
        }

    def called(self, model: nn.Module) -> dict[nn.Module, set[int]]:
        """Return, for each module that is called, by which stages."""
        found: dict[nn.Module, set[int]] = {}
        for part in self.parts:
            for node in (*part.nodes, *self.repeated):
                if node.op == "call_module":
                    found.setdefault(model.get_submodule(str(node.target)), set()).add(part.number)
        return found


def _part(graph: fx.Graph, stage_of: Mapping[fx.Node, int], number: int, count: int) -> Part:
    own = {node for node, stage in stage_of.items() if stage == number}
    read = {used for node in own for used in node.all_input_nodes if used.op == "get_attr" and used not in stage_of}
    nodes = [node for node in graph.nodes if node in own or node in read]
    result = graph.output_node().args[0] if number == count - 1 else None
    received, sent = _crossing(graph, stage_of, number, count), _crossing(graph, stage_of, number + 1, count)
    return Part(number, nodes, received, sent, result)


def _crossing(graph: fx.Graph, stage_of: Mapping[fx.Node, int], stage: int, count: int) -> list[fx.Node]:
    """Return the values that are made before a stage and read by it or by a later one."""

    def last(node: fx.Node) -> int:
        return max((stage_of.get(user, count - 1 if user.op == "output" else -1) for user in node.users), default=-1)

    return [node for node in graph.nodes if stage_of.get(node, count) < stage <= last(node)] if stage < count else []


def _tensors_of(node: fx.Node, model: nn.Module) -> Iterator[Tensor]:
    path, _, name = str(node.target).rpartition(".")
    if node.op == "call_module":
        for module in model.get_submodule(str(node.target)).modules():
            yield from (tensor for tensor in own_parameters(module).values() if tensor is not None)
            yield from (tensor for tensor in own_buffers(module).values() if tensor is not None)
    elif node.op == "get_attr":
        yield getattr(model.get_submodule(path), name)

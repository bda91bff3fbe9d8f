"""Run nodes of an opened graph one after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from ...errors import GuardError
from ...tracing.examples import Inputs
from ...tracing.program import function_of_node
from .layout import Layout, Part

__all__ = ["Feed", "StageModule", "Steps", "Ways", "last_uses"]


def last_uses(nodes: Sequence[fx.Node], kept: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return node -> the values that nothing after it reads, save those that are kept."""
    seen, last = set(kept), dict[fx.Node, list[fx.Node]]()
    for node in reversed(nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                last.setdefault(node, []).append(used)
    return last


class Steps:
    """Some nodes of an opened graph, ready to run.

    Args:
        nodes: in the order of the graph.
        model: holds the modules and tensors that they name.
        results: what is wanted of them, or of what they are given: a structure in which nodes stand for values.
    """

    def __init__(self, nodes: Sequence[fx.Node], model: nn.Module, results: Any) -> None:
        self.results = results
        wanted: list[fx.Node] = []
        map_arg(results, wanted.append)
        last = last_uses(nodes, wanted)
        self._steps = [(node, function_of_node(node, model), last.get(node, [])) for node in nodes]

    def run(self, values: Mapping[fx.Node, Any]) -> Any:
        """Return the results, given the values that the nodes read from outside."""
        known = dict(values)
        for node, function, over in self._steps:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), known.__getitem__)
            known[node] = function(*args, **kwargs)
            for used in over:
                known.pop(used, None)
        return map_arg(self.results, known.__getitem__)


@dataclass
class Feed:
    """What the stages of this rank are given for one step, besides what they send to each other.

    Schedules know microbatches by their numbers alone.

    Attributes:
        ways: by microbatch, the number of the layout that it takes, and what every stage computes for itself.
        targets: by microbatch, what its results are compared with.
        results: by microbatch, what the last stage returned.
        plain: the values that are no tensors, from other stages; equal for all microbatches.
    """

    ways: Sequence[tuple[int, Mapping[fx.Node, Any]]] = ()
    targets: Sequence[Any] = ()
    results: dict[int, Any] = field(default_factory=dict[int, Any])
    plain: Mapping[fx.Node, Any] = field(default_factory=dict[fx.Node, Any])


class PartRun:
    """Run what one stage does, on one way through the model.

    Attributes:
        received, sent: tensors that come from the stage before, and that go on.
        hears, tells: other values that do.
    """

    def __init__(self, part: Part, model: nn.Module, plain: Collection[fx.Node], *, is_last: bool) -> None:
        self.received = [node for node in part.received if node not in plain]
        self.sent = [node for node in part.sent if node not in plain]
        self.hears = [node for node in part.received if node in plain]
        self.tells = [node for node in part.sent if node in plain]
        self.steps = Steps(part.nodes, model, part.result if is_last else (self.sent, self.tells))


class StageModule(nn.Module):
    """Run one stage: what `torch.distributed.pipelining` calls. It owns no tensors; the model does.

    Args:
        layouts: the ways through the model.
        number: of the stage.
        model: holds the modules and tensors.
        feed: of this rank.
    """

    def __init__(self, layouts: Sequence[Layout], number: int, model: nn.Module, feed: Feed) -> None:
        super().__init__()
        self.feed = feed
        self.is_last = number == len(layouts[0].parts) - 1
        self._runs = [PartRun(each.parts[number], model, each.plain, is_last=self.is_last) for each in layouts]

    def hear(self, number: int, told: Sequence[Any]) -> None:
        """Take what the stage before told for a microbatch."""
        run = self._runs[self.feed.ways[number][0]]
        self.feed.plain = {**self.feed.plain, **dict(zip(run.hears, told, strict=True))}

    def run(self, received: Sequence[Tensor], number: int) -> Any:
        """Return the result of the model, or what is sent and what is told to the next stage."""
        way, repeated = self.feed.ways[number]
        run = self._runs[way]
        return run.steps.run({**self.feed.plain, **repeated, **dict(zip(run.received, received, strict=True))})

    def forward(self, *received: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        """Run one microbatch; what the last stage returns is in the feed."""
        result = self.run(received, int(number))
        if not self.is_last:
            return tuple(tensor.contiguous() for tensor in result[0])
        self.feed.results[int(number)] = result
        return (number.new_zeros((), dtype=torch.float32),)


class Ways:
    """Find the way of a call through the model, and compute what every stage computes for itself.

    Args:
        layouts: the ways.
        model: holds the modules and buffers.
    """

    def __init__(self, layouts: Sequence[Layout], model: nn.Module) -> None:
        self._ways = [_Repeated(layout, model) for layout in layouts]

    def of(self, call: Inputs) -> tuple[int, dict[fx.Node, Any]]:
        """Return the number of the first layout that a call fits, and what hangs on its inputs and buffers alone.

        Raises:
            GuardError: the call is of another kind than the example inputs.
        """
        failure: GuardError | None = None
        for number, way in enumerate(self._ways):
            try:
                return number, way.values(call)
            except GuardError as error:
                failure = failure or error
        raise failure or GuardError("there is no way through the model")


class _Repeated:
    def __init__(self, layout: Layout, model: nn.Module) -> None:
        repeated = set(layout.repeated)
        needed = [node for node in layout.repeated if any(user not in repeated for user in node.users)]
        self._nodes = {node.name: node for node in needed}
        self._opened = layout.opened
        self._steps = Steps(layout.repeated, model, dict(self._nodes))

    def values(self, call: Inputs) -> dict[fx.Node, Any]:
        given = self._opened.given(call.args, call.kwargs)
        with torch.no_grad():
            found = self._steps.run(given)
        return {**given, **{self._nodes[name]: value for name, value in found.items()}}

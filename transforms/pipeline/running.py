"""Run the stages: some nodes of an opened graph one after the other, and one stage after the other over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, distributed, fx, nn
from torch.fx.node import map_arg

from ...errors import GuardError
from ...tracing.examples import Inputs
from ...tracing.program import function_of_node
from .layout import Layout, StagePart
from .opening import OpenedModel

__all__ = ["Feed", "Forms", "Relay", "StageModule", "Ways"]


class Steps:
    """Nodes of an opened graph, in order, ready to run; `results` is a structure in which nodes stand for values."""

    def __init__(self, nodes: Sequence[fx.Node], model: nn.Module, results: Any) -> None:
        self.results = results
        read = set[fx.Node]()
        map_arg(results, read.add)
        self._steps: list[tuple[fx.Node, Callable[..., Any], list[fx.Node]]] = []
        for node in reversed(nodes):
            over = [used for used in dict.fromkeys(node.all_input_nodes) if used not in read]
            read.update(over)
            self._steps.insert(0, (node, function_of_node(node, model), over))

    def run(self, values: Mapping[fx.Node, Any]) -> Any:
        known = dict(values)
        for node, function, over in self._steps:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), known.__getitem__)
            known[node] = function(*args, **kwargs)
            for used in over:
                known.pop(used, None)
        return map_arg(self.results, known.__getitem__)


@dataclass
class Feed:
    """What the stages of this rank are given for one step besides tensors; schedules know microbatches by number."""

    ways: Sequence[tuple[int, Mapping[fx.Node, Any]]] = ()  # by microbatch: number of its layout, repeated values
    targets: Sequence[Any] = ()  # by microbatch, what its results are compared with
    results: dict[int, Any] = field(default_factory=dict[int, Any])  # by microbatch, what the last stage returned
    plain: Mapping[fx.Node, Any] = field(default_factory=dict[fx.Node, Any])  # from other stages, no tensors


class _PartRun:
    """Run what one stage does, on one way through the model."""

    def __init__(self, part: StagePart, model: nn.Module, plain: Collection[fx.Node], *, is_last: bool) -> None:
        self.received = [node for node in part.received if node not in plain]
        self.sent = [node for node in part.sent if node not in plain]
        self.plain_received = [node for node in part.received if node in plain]  # no tensors: sent beside them
        self.plain_sent = [node for node in part.sent if node in plain]
        self.steps = Steps(part.nodes, model, part.result if is_last else (self.sent, self.plain_sent))


class StageModule(nn.Module):
    """Run one stage: what `torch.distributed.pipelining` calls. It owns no tensors; the model does."""

    def __init__(self, layouts: Sequence[Layout], number: int, model: nn.Module, feed: Feed) -> None:
        super().__init__()
        self.feed = feed
        self.is_last = number == len(layouts[0].parts) - 1
        self._runs = [_PartRun(each.parts[number], model, each.plain, is_last=self.is_last) for each in layouts]

    def receive_plain(self, number: int, values: Sequence[Any]) -> None:
        """Take the plain values that the stage before sent for a microbatch."""
        run = self._runs[self.feed.ways[number][0]]
        self.feed.plain = {**self.feed.plain, **dict(zip(run.plain_received, values, strict=True))}

    def run(self, received: Sequence[Tensor], number: int) -> Any:
        """Return the result of the model, or the tensors and the plain values for the next stage."""
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
    """Find the way of a call through the model, and compute what every stage computes for itself."""

    def __init__(self, layouts: Sequence[Layout], model: nn.Module) -> None:
        self._ways: list[tuple[OpenedModel, Steps, dict[str, fx.Node]]] = []
        for layout in layouts:
            repeated = set(layout.repeated)
            needed = [node for node in layout.repeated if any(user not in repeated for user in node.users)]
            nodes = {node.name: node for node in needed}
            self._ways.append((layout.opened, Steps(layout.repeated, model, dict(nodes)), nodes))

    def of(self, call: Inputs) -> tuple[int, dict[fx.Node, Any]]:
        """Return the number of the first layout that a call fits, and what hangs on its inputs and buffers alone."""
        failure: GuardError | None = None
        for number, (opened, steps, nodes) in enumerate(self._ways):
            try:
                given = opened.given(call.args, call.kwargs)
                with torch.no_grad():
                    found = steps.run(given)
                return number, {**given, **{nodes[name]: value for name, value in found.items()}}
            except GuardError as error:
                failure = failure or error
        raise failure or GuardError("no graph of the model fits this call")


Forms = tuple[Tensor, ...]
"""What tensors cross, on the meta device."""

Crossed = tuple[list[Tensor], list[Any]]
"""What crosses: tensors, and what is no tensor."""


@dataclass(frozen=True)
class Relay:
    """The stages of this rank among those of all ranks."""

    stages: Mapping[int, StageModule]  # of this rank, by number
    count: int  # of all stages
    device: torch.device  # of this rank

    def run(self, number: int) -> dict[int, Forms]:
        """Run a microbatch through all stages; return what crossed before each, as far as this rank has seen it."""
        seen: dict[int, Forms] = {}
        crossed: Crossed = ([], [])
        for key in range(self.count):
            if key in self.stages:
                crossed = self._run_stage(key, crossed, number, seen)
            if key + 1 < self.count:
                crossed = self._hand_over(key, crossed)
        return seen

    def _run_stage(self, key: int, received: Crossed, number: int, seen: dict[int, Forms]) -> Crossed:
        stage = self.stages[key]
        # Another rank's device is not here.
        here = [self.device if isinstance(value, torch.device) else value for value in received[1]]
        stage.receive_plain(number, here)
        seen[key] = tuple(map(_described, received[0]))
        result = stage.run(received[0], number)
        if stage.is_last:
            stage.feed.results[number] = result
            return [], []
        tensors = [tensor.contiguous() for tensor in result[0]]
        seen[key + 1] = tuple(map(_described, tensors))
        return tensors, result[1]

    def _hand_over(self, key: int, crossed: Crossed) -> Crossed:
        """Give what a stage sends to the next, which may be on another rank."""
        size = distributed.get_world_size()
        source, target, rank = key % size, (key + 1) % size, distributed.get_rank()
        if source == target or rank not in (source, target):
            return [_leaf(t, t.requires_grad) for t in crossed[0]], crossed[1]
        if rank == source:
            forms = [(tuple(t.shape), t.dtype, t.requires_grad) for t in crossed[0]]
            distributed.send_object_list([(forms, crossed[1])], dst=target, device=self.device)
            for tensor in crossed[0]:
                distributed.send(tensor.detach(), dst=target)
            return [], []
        objects: list[Any] = [None]
        distributed.recv_object_list(objects, src=source, device=self.device)
        forms, plain = cast("tuple[Sequence[tuple[tuple[int, ...], torch.dtype, bool]], list[Any]]", objects[0])
        tensors: list[Tensor] = []
        for shape, dtype, requires_grad in forms:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            distributed.recv(tensor, src=source)
            tensors.append(_leaf(tensor, requires_grad))
        return tensors, plain


def _leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    return tensor.detach().requires_grad_(requires_grad and torch.is_grad_enabled())


def _described(tensor: Tensor) -> Tensor:
    form = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return form.requires_grad_(tensor.requires_grad)

"""Run the stages: some nodes of an opened graph one after the other, and one stage after the other over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, distributed, fx, nn
from torch.fx.node import map_arg

from ...errors import GuardError, UsageError
from ...runtime.values import tensors_within
from ...tracing.examples import Inputs
from ...tracing.program import function_of_node
from .layout import Layout, StagePart
from .opening import OpenedModel
from .together import Together

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
    error: Exception | None = None  # the first one of the step on this rank


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

    def __init__(
        self, layouts: Sequence[Layout], number: int, model: nn.Module, feed: Feed, *, halves: bool = False
    ) -> None:
        super().__init__()
        self.number, self.halves = number, halves  # whether gradients of inputs and of parameters come one by one
        self.feed = feed
        self.is_last = number == len(layouts[0].parts) - 1
        self.sent: Forms = ()  # what a schedule expects of each microbatch, on the meta device
        self._tensors: Callable[[], Iterable[Tensor]] = lambda: _tensors_of(layouts, number, model)
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

    def forward(self, *received: Tensor, number: Tensor, alone: bool = False) -> Any:
        """Run one microbatch; what the last stage returns is in the feed. `alone`: as `run` does, by no schedule."""
        if alone:
            return self.run(received, int(number))
        try:
            result = self.run(received, int(number))
        except Exception as error:  # the other ranks wait for what this one sends: raised after the step
            self.feed.error = self.feed.error or error
            return tuple(torch.zeros_like(t, device=number.device, requires_grad=t.requires_grad) for t in self.sent)
        if not self.is_last:
            return tuple(self._owned(tensor) for tensor in result[0])
        self.feed.results[int(number)] = result
        return (number.new_zeros((), dtype=torch.float32),)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield what the stage trains: schedules that divide the backward ask for it."""
        found = {id(tensor): tensor for tensor in self._tensors() if isinstance(tensor, nn.Parameter)}
        yield from found.values()

    def _owned(self, tensor: Tensor) -> Tensor:
        """Return a tensor to send; torch detaches it in place between two halves of a backward, so nobody else's."""
        return tensor.clone(memory_format=torch.contiguous_format) if self.halves else tensor.contiguous()

    def check_halves(self, received: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Raise UsageError where torch would lose gradients of parameters: those that no path to an input meets."""
        if self.halves and self.number and not all(_hangs_on(each, received) for each in results if each.requires_grad):
            raise UsageError(
                f"the zero-bubble schedules cannot divide the backward of stage {self.number}: something that it gives "
                "does not depend on what it receives with gradients (frozen layers before it, say); give "
                "schedule=interleaved"
            )


class Ways:
    """Find the way of a call through the model, and compute what every stage computes for itself."""

    def __init__(self, layouts: Sequence[Layout], model: nn.Module) -> None:
        self._ways: list[tuple[OpenedModel, Steps, dict[str, fx.Node]]] = []
        for layout in layouts:
            repeated = set(layout.repeated)
            needed = [node for node in layout.repeated if any(user not in repeated for user in node.users)]
            nodes = {node.name: node for node in needed}
            self._ways.append((layout.opened, Steps(layout.repeated, model, dict(nodes)), nodes))

    def of(self, call: Inputs, unfit: Mapping[int, str] | None = None) -> tuple[int, dict[fx.Node, Any]]:
        """Return the number of the first layout that a call fits, and what hangs on its inputs and buffers alone.

        `unfit` says which ones did not fit once they ran, and why.
        """
        unfit = unfit or {}
        failure: GuardError | None = next(map(GuardError, unfit.values()), None)
        for number, (opened, steps, nodes) in enumerate(self._ways):
            if number in unfit:
                continue
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
    rank_of: Sequence[int]  # by stage
    device: torch.device  # of this rank
    together: Together

    def run(self, number: int) -> dict[int, Forms]:
        """Run a microbatch through all stages; return what crossed before each, as far as this rank has seen it.

        What a stage raises is raised on all ranks.
        """
        seen: dict[int, Forms] = {}
        crossed: Crossed | None = ([], [])  # None: a stage failed
        error: Exception | None = None
        for key in range(len(self.rank_of)):
            if key in self.stages and crossed is not None:
                try:
                    crossed = self._run_stage(key, crossed, number, seen)
                except Exception as caught:
                    error, crossed = caught, None
            if key + 1 < len(self.rank_of):
                crossed = self._hand_over(key, crossed)
        self.together.raise_any(error)
        return seen

    def _run_stage(self, key: int, received: Crossed, number: int, seen: dict[int, Forms]) -> Crossed:
        stage = self.stages[key]
        # Another rank's device is not here.
        here = [self.device if isinstance(value, torch.device) else value for value in received[1]]
        stage.receive_plain(number, here)
        seen[key] = tuple(map(_described, received[0]))
        result = stage(*received[0], number=torch.tensor(number), alone=True)
        stage.check_halves(received[0], list(tensors_within(result if stage.is_last else result[0])))
        if stage.is_last:
            stage.feed.results[number] = result
            return [], []
        tensors = [tensor.contiguous() for tensor in result[0]]
        seen[key + 1] = tuple(map(_described, tensors))
        return tensors, result[1]

    def _hand_over(self, key: int, crossed: Crossed | None) -> Crossed | None:
        """Give what a stage sends to the next, which may be on another rank."""
        source, target, rank = self.rank_of[key], self.rank_of[key + 1], distributed.get_rank()
        if source == target or rank not in (source, target):
            return crossed and ([_leaf(t, t.requires_grad) for t in crossed[0]], crossed[1])
        if rank == source:
            tensors = crossed[0] if crossed else []
            forms = [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
            distributed.send_object_list([crossed and (forms, crossed[1])], dst=target, device=self.device)
            for tensor in tensors:
                distributed.send(tensor.detach(), dst=target)
            return crossed and ([], [])
        objects: list[Any] = [None]
        distributed.recv_object_list(objects, src=source, device=self.device)
        if objects[0] is None:
            return None
        forms, plain = cast("tuple[Sequence[tuple[tuple[int, ...], torch.dtype, bool]], list[Any]]", objects[0])
        tensors: list[Tensor] = []
        for shape, dtype, requires_grad in forms:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            distributed.recv(tensor, src=source)
            tensors.append(_leaf(tensor, requires_grad))
        return tensors, plain


def _leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    return tensor.detach().requires_grad_(requires_grad and torch.is_grad_enabled())


def _hangs_on(result: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Say whether autograd gets from a tensor to one of the leaves `inputs`."""
    leaves = {id(each) for each in inputs if each.requires_grad}
    pending, seen = [result.grad_fn], set[Any]()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in leaves:
            return True
        pending += [each for each, _ in node.next_functions]
    return id(result) in leaves


def _tensors_of(layouts: Sequence[Layout], number: int, model: nn.Module) -> Iterator[Tensor]:
    for layout in layouts:
        yield from layout.tensors(model, layout.parts[number : number + 1])[number].values()


def _described(tensor: Tensor) -> Tensor:
    form = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return form.requires_grad_(tensor.requires_grad)

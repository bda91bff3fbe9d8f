"""What `optimize` returns: one rank's part of a model that is trained in stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, distributed, fx, nn

from ...compat import all_modules, modules_by_name
from ...compat.distributed import shard_again
from ...errors import FxoptError, GuardError, UsageError
from ...layers.distributed import BATCH_NORMS
from ...runtime.values import map_tensors, tensors_within, whole_tensor
from ...tracing.examples import Inputs, normalize_inputs
from ...tracing.isolation import preserved
from .layout import Layout
from .line import Line
from .part import Placement, RankPart
from .running import Feed, Forms, Relay, StageModule, Ways
from .together import Together

__all__ = ["PipelineModule", "Schedule", "check_norms", "divided", "rows_of"]


Schedule = Literal["1f1b", "gpipe", "interleaved", "zero_bubble", "zero_bubble_v"]
"""The order of forwards and backwards; classes of `torch.distributed.pipelining` run them."""

Loss = Callable[[Any, Any], Tensor]
"""Gives the loss of one microbatch from what the model returns and the target."""


_Prepared = tuple[Any, Mapping[fx.Node, Any]]
"""The schedule for batches of one form, and the values from other stages that are no tensors."""


class PipelineModule(RankPart):
    """One rank's stages of a model: `step` trains all stages together, a call evaluates them."""

    def __init__(
        self, model: nn.Module, layouts: Sequence[Layout], schedule: Schedule, microbatches: int, line: Line
    ) -> None:
        placement = Placement.of(model, layouts, line, turns=schedule == "zero_bubble_v")
        super().__init__(model, placement)
        for layout in layouts:
            layout.forget_unreadable()
        self._count, self._schedule, self._microbatches = len(layouts[0].parts), schedule, microbatches
        self._placement, self._together = placement, Together(line)
        self._feed, self._prepared, self._unfit = Feed(), dict[Any, _Prepared](), defaultdict[Any, dict[int, str]](dict)
        self._ways = Ways(layouts, model)
        self.stages = placement.own
        halves = schedule in ("zero_bubble", "zero_bubble_v")
        vars(self)["_runs"] = {
            number: StageModule(layouts, number, model, self._feed, halves=halves) for number in self.stages
        }

    @property
    def called(self) -> set[nn.Module]:
        """Return the modules that this rank's stages call, and those inside them."""
        calls = (module for module, stages in self._placement.called.items() if not stages.isdisjoint(self.stages))
        return {inside for module in calls for inside in all_modules(module)}

    def divide_stage(self, divide: Callable[[StageModule], None]) -> None:
        """Let `divide` split the parameters of this rank's one stage over the ranks that have the same stage."""
        names = {parameter: name for name, parameter in self.named_parameters()}
        (stage,) = self._runs.values()
        stage.add_module("model", self._whole)
        divide(stage)
        now = dict(self.named_parameters())
        tied = tuple(replace(each, parameter=now[names[each.parameter]]) for each in self._placement.tied)
        self._placement = replace(self._placement, tied=tied)

    @property
    def stage(self) -> int:
        """Return the number of this rank's stage; of several, of the first."""
        return self.stages[0]

    # -- training --------------------------------------------------------------------------------------------------

    def step(self, batch: object, target: Any, loss: Loss, *, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
        """Run forward and backward of a whole batch through all stages; return its loss, on every rank.

        Every rank calls this with the same batch. Gradients are added to those that are there, as `backward` does.

        Args:
            batch: as for `example_inputs` of `optimize`; one call.
            target: its first dimensions are the rows of the batch.
            loss: of what the model returns and the target, for some rows.
            reduction: whether the loss of the batch is the mean or the sum of that of its microbatches.

        Raises:
            UsageError: the batch does not divide into microbatches; batch norms in training.
            GuardError: the batch is of another kind than the example inputs.
        """
        calls, failed = self._divided(batch, target)
        self._together.agree(failed, self._given(*calls[:1]))
        schedule, self._feed.plain = self._ready(calls)
        self._loss, self._scale = loss, len(calls) if reduction == "mean" else 1
        losses: list[Tensor] = []
        numbers = torch.arange(len(calls))
        with self._placement.synchronised(), torch.enable_grad():
            schedule.step(number=numbers, target=numbers, losses=losses, return_outputs=False)
        error, self._feed.error = self._feed.error, None
        self._feed.ways, self._feed.targets = (), ()
        self._together.raise_any(error, "; the gradients of this step are incomplete: zero them before the next one")
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for each in losses:
            total += each.detach()
        distributed.broadcast(total, src=self._last_rank, group=self._line.group)  # every rank is told
        return total

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of all stages to a norm of at most `max_norm`; return on every rank what it was."""
        parameters = [p for p in self.parameters() if p.grad is not None]
        gradients = self._placement.counted(parameters)
        total = torch.zeros((), device=self._device, dtype=torch.float64)
        for gradient in gradients:
            total += whole_tensor(gradient.detach().double().square().sum())
        distributed.all_reduce(total, group=self._line.group)
        norm = total.sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def _divided(self, batch: object, target: Any) -> tuple[Sequence[Inputs], FxoptError | None]:
        """Feed the microbatches of a batch; return them, or why it cannot be taken."""
        try:
            call = _one_call(batch)
            check_norms(self._whole)
            calls = divided(call, self._microbatches)
            self._feed.targets = divided_target(target, rows_of(call), len(calls))
            self._feed.ways = [self._way(each) for each in calls]
        except FxoptError as error:
            return (), error
        return calls, None

    def _way(self, call: Inputs) -> tuple[int, dict[fx.Node, Any]]:
        """Return the way of a call among those that are not known to be unfit for calls of its form."""
        unfit = self._unfit[_form(call), self.training]
        try:
            return self._ways.of(self._here(call), unfit)
        except GuardError as error:
            unfit.clear()  # it may have been for data
            rows = "1 row" if rows_of(call) == 1 else f"{rows_of(call)} rows"
            raise GuardError(
                f"{error}. This call has {rows}: where microbatches have so many, give [batch, {rows} of it]"
            ) from error

    def _given(self, *calls: Inputs) -> object:
        """Return what has to be the same on all ranks."""
        return list(map(_form, calls)), [way for way, _ in self._feed.ways], self.training

    def _ready(self, calls: Sequence[Inputs]) -> _Prepared:
        """Return the schedule for batches of a form; the first one of a form goes through all stages once before."""
        while True:
            ways = [way for way, _ in self._feed.ways]
            key = (_form(calls[0]), frozenset(ways), self.training)
            if key not in self._prepared:
                first = {way: ways.index(way) for way in sorted(set(ways))}
                self._feed.plain = {}
                with preserved(self._whole), torch.enable_grad():
                    seen = {number: self._relayed(calls[number], number) for number in first.values()}
                    self._shard_again()
                if None in seen.values():
                    self._feed.ways = [self._way(each) for each in calls]
                    continue
                self._prepared[key] = self._prepare([each for each in seen.values() if each is not None])
            return self._prepared[key]

    def _relayed(self, call: Inputs, number: int) -> dict[int, Forms] | None:
        """Send a microbatch through all stages; return what crosses, or None where another way has to be tried."""
        try:
            return self._relay.run(number)
        except GuardError as error:  # a check of sizes that only a stage knows
            self._unfit[_form(call), self.training][self._feed.ways[number][0]] = str(error)
            return None

    def _prepare(self, seen: Sequence[dict[int, Forms]]) -> _Prepared:
        """Return the schedule for what crosses on each way."""
        self._feed.results.clear()
        forms, count, loss_form = seen[0], self._count, (torch.empty((), device="meta"),)
        crossing = [{k: [(t.shape, t.dtype, t.requires_grad) for t in each[k]] for k in each} for each in seen]
        if any(other != crossing[0] for other in crossing):
            raise UsageError(
                "the microbatches of this batch take different paths through the model, and other values cross between "
                "stages on each; put rows of one kind into a batch"
            )
        from torch.distributed import pipelining  # it brings torch's compiler along: only where it is used

        for number, run in self._runs.items():
            run.sent = forms.get(number + 1, loss_form)
        stages = [
            pipelining.PipelineStage(run, number, count, self._device, forms[number], run.sent, group=self._line.group)
            for number, run in self._runs.items()
        ]
        classes = {
            "1f1b": pipelining.Schedule1F1B,
            "gpipe": pipelining.ScheduleGPipe,
            "interleaved": pipelining.ScheduleInterleaved1F1B,
            "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
            "zero_bubble_v": pipelining.ScheduleZBVZeroBubble,
        }
        # The loss is divided: torch would divide all gradients, those of earlier steps, too, and tied ones twice.
        given: Any = stages[0] if self._schedule in ("1f1b", "gpipe") else stages
        schedule: Any = classes[self._schedule]
        made = schedule(given, n_microbatches=self._microbatches, loss_fn=self._loss_of, scale_grads=False)
        return made, dict(self._feed.plain)

    def _loss_of(self, _: Any, number: Tensor) -> Tensor:
        try:
            return self._loss(self._feed.results.pop(int(number)), self._feed.targets[int(number)]) / self._scale
        except Exception as error:  # raised after the step, for which the other ranks wait; or the model's came before
            self._feed.error = self._feed.error or error
            return torch.zeros((), device=self._device, requires_grad=True)

    # -- evaluation ------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return on every rank what the model returns, without gradients; all ranks call this with the same batch."""
        call, seen = _one_call(Inputs(*args, **kwargs)), None
        while seen is None:
            failed, self._feed.ways, self._feed.plain = None, (), {}
            try:
                self._feed.ways = [self._way(call)]
            except FxoptError as error:
                failed = error
            self._together.agree(failed, self._given(call))
            with torch.no_grad():
                seen = self._relayed(call, 0)
            self._shard_again()
        results = [map_tensors(lambda tensor: tensor.cpu(), self._feed.results.pop(0, None))]
        distributed.broadcast_object_list(results, src=self._last_rank, group=self._line.group)
        return self._here(results[0])

    def _here(self, value: Any) -> Any:
        """Return a call, or a result, with its tensors on this rank's device."""
        if isinstance(value, Inputs):
            return Inputs(*self._here(value.args), **self._here(value.kwargs))
        return map_tensors(lambda tensor: tensor.to(self._device), value)

    def _shard_again(self) -> None:
        """Free what FSDP2 has gathered for a forward that no backward follows."""
        for module in (module for run in self._runs.values() for module in all_modules(run)):
            shard_again(module)

    @property
    def _relay(self) -> Relay:
        return Relay(self._runs, self._placement.rank_of, self._device, self._together)

    @property
    def _last_rank(self) -> int:
        return self._placement.rank_of[-1]


def _form(call: Inputs) -> tuple[Any, ...]:
    return tuple((tuple(t.shape), t.dtype) for t in tensors_within((call.args, call.kwargs)))


def _one_call(batch: object) -> Inputs:
    calls = normalize_inputs(batch)
    if len(calls) != 1:
        raise UsageError("step takes one batch: a tuple (positional), a dict (keywords), fxopt.Inputs or a tensor")
    return calls[0]


def rows_of(call: Inputs) -> int:
    """Return the batch size, the first dimension of the first tensor; UsageError where there is none."""
    tensors = (tensor for tensor in tensors_within((call.args, call.kwargs)) if tensor.ndim)
    first = next(tensors, None)
    if first is None:
        raise UsageError("the batch holds no tensor with rows, so it cannot be divided into microbatches")
    return first.shape[0]


def divided(call: Inputs, count: int) -> list[Inputs]:
    """Return the microbatches of a batch; what has other rows goes to each. UsageError: it does not divide."""
    rows = rows_of(call)
    if rows % count:
        raise UsageError(
            f"a batch of {rows} rows does not divide into {count} microbatches: give a multiple of {count} rows "
            "(drop_last=True in the DataLoader), or another number of microbatches to the pass"
        )
    return [
        Inputs(*_slice(call.args, rows, number, count), **_slice(call.kwargs, rows, number, count))
        for number in range(count)
    ]


def divided_target(target: Any, rows: int, count: int) -> Sequence[Any]:
    """Return the microbatches of a target; UsageError where it has other rows than the batch."""
    for tensor in tensors_within(target):
        if tensor.ndim and tensor.shape[0] != rows:
            raise UsageError(f"the target has {tensor.shape[0]} rows, the batch {rows}; give one row of it for each")
    return [_slice(target, rows, number, count) for number in range(count)]


def _slice(value: Any, rows: int, number: int, count: int) -> Any:
    size = rows // count

    def part(tensor: Tensor) -> Tensor:
        has_rows = tensor.ndim and tensor.shape[0] == rows
        return tensor[number * size : (number + 1) * size] if has_rows else tensor

    return map_tensors(part, value)


def check_norms(model: nn.Module) -> None:
    """Raise UsageError where a batch norm computes statistics: they would be of microbatches."""
    for name, module in modules_by_name(model).items():
        if isinstance(module, BATCH_NORMS) and (module.training or not module.track_running_stats):
            raise UsageError(
                f"'{name}' is a {type(module).__name__} in training, and a pipeline would give it statistics of "
                "microbatches: freeze it (.eval() after every model.train()), or use GroupNorm"
            )

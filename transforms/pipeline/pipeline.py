"""Train a model in stages, each on its own rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import distributed, nn

from ...errors import GuardError, MatchFailure, UsageError
from ...passes.contract import Pass, launch_command, require_process_group, require_same_weights
from ...passes.sites import Goal, Numerics, Refusal, Site
from ...passes.verification import distance, half_the_digits
from ...runtime.values import tensors_in
from ...tracing.examples import Inputs
from ...tracing.isolation import in_phase, preserved
from ...tracing.program import Program
from ...tracing.recording import copy_inputs
from .costs import Cost
from .find import find_stages, other_routes
from .layout import Layout
from .line import Line
from .module import PipelineModule, Schedule, check_norms, divided, rows_of
from .running import Feed, StageModule, Ways

__all__ = ["Pipeline", "run_trial_step"]


@dataclass(frozen=True)
class Pipeline(Pass):
    """Train a model in stages, each on its own rank, with microbatches that follow each other through them.

    Before: model(batch) on one device
    After: a `PipelineModule` on each rank, that holds its stages; `model.step(batch, target, loss)` trains all of them
    Refuses: no process group, or one that does not fit the stages; batch norms in training; a model whose rows depend
        on each other, or whose forward could not be captured.

    Options:
        stages: how many; by default one for each process, two with the schedules below that interleave.
        schedule: `1f1b`, `gpipe`, or with several stages on each process `interleaved`, `zero_bubble` (it also divides
            the backward) or `zero_bubble_v` (likewise, and the last stage is where the first one is), of
            `torch.distributed.pipelining`.
        microbatches: how many a batch is divided into; by default two for each process.
        cost: what the stages are balanced by: `flops`, or `time` as measured on rank 0.
    """

    stages: int | None = None
    schedule: Schedule = "1f1b"
    microbatches: int | None = None
    cost: Cost = "flops"

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.PARALLEL
    trains_by_call: ClassVar[bool] = False  # it has `.step`

    def check(self, model: nn.Module) -> None:
        require_process_group(self.name, max(2, (self.stages or 2) // self._each))
        self.check_for(model, distributed.get_world_size())

    def check_for(self, model: nn.Module, processes: int) -> None:
        """Raise UsageError for a model, or a number of processes, that stages do not do for."""
        self._check_sizes(processes)
        check_norms(model)

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        stages = self._stages(distributed.get_world_size())
        try:
            if not program.whole_calls:
                raise MatchFailure("example_inputs are needed to measure the parts of the model")
            found = find_stages(program, stages, self.cost)
            others = list(other_routes(program, found))
            routes = [found.data(), *(route for route in others if not isinstance(route, Refusal))]
            self._rehearse(program, routes)
        except MatchFailure as failure:  # no site would mean no pipeline, and each rank with the whole model
            raise UsageError(f"pass 'pipeline': {failure}") from failure
        yield from (refusal for refusal in others if isinstance(refusal, Refusal))
        crossing = f"{found.stages.crossing:,} bytes cross"
        detail = f"{stages} stages, the slowest {1 + found.stages.imbalance:.2f} of the mean, {crossing}"
        yield Site(program, "", {}, data={"routes": routes}, detail=detail)

    def _rehearse(self, program: Program, routes: Sequence[dict[str, Any]]) -> None:
        layouts = [Layout.of(program.model, route) for route in routes]
        for number, call in enumerate(program.whole_calls):
            try:
                run_trial_step(program.model, layouts, call, training=program.training)
            except GuardError as error:
                if number == 0:
                    raise MatchFailure(str(error)) from error

    def finalize(self, model: nn.Module, sites: Sequence[Site]) -> nn.Module:
        require_same_weights(model, self.name)
        return self.cut(model, sites[0].data["routes"], Line.of())

    def cut(self, model: nn.Module, routes: Sequence[Mapping[str, Any]], line: Line) -> PipelineModule:
        """Return this rank's part of a model, whose other stages are on the other ranks of a line."""
        layouts = [Layout.of(model, route) for route in routes]
        return PipelineModule(model, layouts, self.schedule, self._microbatches(line.size), line)

    def _stages(self, processes: int) -> int:
        return self.stages or processes * self._each

    @property
    def _each(self) -> int:
        """Return how many stages a process has, unless told."""
        return 1 if self.schedule in ("1f1b", "gpipe") else 2

    def _microbatches(self, processes: int) -> int:
        return self.microbatches or 2 * processes

    def _check_sizes(self, processes: int) -> None:
        stages, microbatches = self._stages(processes), self._microbatches(processes)
        if stages < 1 or microbatches < 1:
            raise UsageError("pass 'pipeline': give a positive number of stages and of microbatches")
        if self.schedule == "zero_bubble_v" and stages != 2 * processes:
            raise UsageError(
                f"pass 'pipeline': {stages} stages do not fit schedule zero_bubble_v on {processes} processes; give "
                f"stages={2 * processes}"
            )
        if self._each > 1 and (stages % processes or stages < 2 * processes):
            fits = f"a multiple of {processes}, at least {2 * processes}"
            raise UsageError(
                f"pass 'pipeline': {stages} stages do not fit {processes} interleaved processes; give {fits}"
            )
        if self._each == 1 and stages != processes:
            raise UsageError(
                f"pass 'pipeline': {stages} stages do not fit {processes} processes; run "
                f"{launch_command(stages)}, or give stages={processes}"
            )
        if self.schedule == "1f1b" and microbatches < stages:
            raise UsageError(
                f"pass 'pipeline': schedule 1f1b needs at least as many microbatches as stages: {stages}, not "
                f"{microbatches}"
            )
        if self.schedule in ("interleaved", "zero_bubble") and microbatches % max(1, microbatches // processes):
            raise UsageError(
                f"pass 'pipeline': {microbatches} microbatches do not fit {processes} interleaved processes; give a "
                f"multiple of {processes}"
            )


def run_trial_step(model: nn.Module, layouts: Sequence[Layout], call: Inputs, *, training: bool) -> None:
    """Raise MatchFailure where the stages give something else than the model, for the batch and two halves of it."""
    failure: GuardError | None = None
    rows = rows_of(call)
    halves = 2 if rows % 2 == 0 else 1
    # In evaluation, where the graphs hold there: dropout would draw otherwise for halves.
    for mode, count in ((False, halves), (False, 1), (training, 1)):
        try:
            reason = _difference(model, layouts, call, count, mode)
        except GuardError as error:
            failure = error
            continue  # a half, or the other mode, takes another path; the next one may not
        if reason and count > 1 and not _difference(model, layouts, call, 1, mode):
            raise MatchFailure(
                f"the rows of a batch depend on each other: of two halves {reason} (statistics of the batch, say, "
                "or a loss over it), so microbatches would train another model"
            )
        if reason:
            raise MatchFailure(f"the results of the stages differ from the model's: {reason}")
        return
    raise failure or GuardError("no graph of the stages fits this call")


def _difference(model: nn.Module, layouts: Sequence[Layout], call: Inputs, count: int, training: bool) -> str:
    given = copy_inputs(call)
    with preserved(model), in_phase(model, training), torch.no_grad():
        whole = list(tensors_in(model(*given.args, **given.kwargs)))
    with preserved(model), in_phase(model, training), torch.no_grad():
        parts = [list(tensors_in(result)) for result in _results(model, layouts, divided(copy_inputs(call), count))]
    for number, tensor in enumerate(whole):
        pieces = [part[number] for part in parts]
        rows = sum(piece.shape[0] for piece in pieces if piece.ndim)
        if count > 1 and (not tensor.ndim or rows != tensor.shape[0]):
            continue
        joined = torch.cat(pieces) if count > 1 else pieces[0]
        if tensor.is_meta:  # there are no numbers to compare
            continue
        reason = distance(tensor, joined, half_the_digits(tensor)).reason
        if reason:
            return f"output {number} {reason}"
    return ""


def _results(model: nn.Module, layouts: Sequence[Layout], calls: Sequence[Inputs]) -> list[Any]:
    feed = Feed()
    stages = [StageModule(layouts, part.number, model, feed) for part in layouts[0].parts]
    feed.ways = list(map(Ways(layouts, model).of, calls))
    found: list[Any] = []
    for number in range(len(calls)):
        crossed: Any = ((), ())
        for stage in stages:
            stage.receive_plain(number, crossed[1])
            crossed = stage.run(crossed[0], number)
        found.append(crossed)
    return found

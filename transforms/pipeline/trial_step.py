"""Run all stages in one process, before anything is cut, and compare them with the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...errors import GuardError, MatchFailure
from ...passes.verification import distance, half_the_digits
from ...runtime.values import tensors_in
from ...tracing.examples import Inputs
from ...tracing.isolation import in_phase, preserved
from ...tracing.recording import copy_inputs
from .batches import divided, rows_of
from .layout import Layout
from .running import Feed, StageModule, Ways

__all__ = ["run_trial_step"]


def run_trial_step(model: nn.Module, layouts: Sequence[Layout], call: Inputs, *, training: bool) -> None:
    """Raise MatchFailure where the stages give something else than the model, for the batch and two halves of it.

    In evaluation, where the graphs hold there: dropout would draw otherwise for halves. GuardError: not for this call.
    """
    failure: GuardError | None = None
    rows = rows_of(call)
    halves = 2 if rows % 2 == 0 else 1
    for mode, count in ((False, halves), (False, 1), (training, 1)):
        try:
            problem = _difference(model, layouts, call, count, mode)
        except GuardError as error:
            failure = error
            continue  # a half, or the other mode, takes another path; the next one may not
        if problem and count > 1 and not _difference(model, layouts, call, 1, mode):
            raise MatchFailure(
                f"the rows of a batch depend on each other: of two halves {problem} (statistics of the batch, say, "
                "or a loss over it), so microbatches would train another model"
            )
        if problem:
            raise MatchFailure(f"the stages do not give what the model gives: {problem}")
        return
    raise failure or GuardError("the stages are not for this call")


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
        problem = distance(tensor, torch.cat(pieces) if count > 1 else pieces[0], half_the_digits(tensor)).problem
        if problem:
            return f"output {number} {problem}"
    return ""


def _results(model: nn.Module, layouts: Sequence[Layout], calls: Sequence[Inputs]) -> list[Any]:
    feed = Feed()
    stages = [StageModule(layouts, part.number, model, feed) for part in layouts[0].parts]
    feed.ways = list(map(Ways(layouts, model).of, calls))
    found: list[Any] = []
    for number in range(len(calls)):
        crossed: Any = ((), ())
        for stage in stages:
            stage.hear(number, crossed[1])
            crossed = stage.run(crossed[0], number)
        found.append(crossed)
    return found

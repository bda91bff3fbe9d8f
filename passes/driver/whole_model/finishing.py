"""What passes do to the finished model: shard it, replicate it, cut it into stages, on all ranks or on none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....compat import all_modules
from ....compat_distributed import shard_again
from ....errors import FxoptError, PassError
from ....tracing.program import Program
from ....tracing.recording import copy_inputs, in_phase, preserved
from ....tracing.values import Inputs, tensors_in
from ...contract import Pass
from ...pipeline import Decision, Ranks, on_all_ranks
from ...sites import Goal, Numerics, Site
from ...state import RECORD_KEY
from ...verification import Tolerance, distance, form_problem, half_the_digits, is_on_meta, scale_of
from ..record import Record

__all__ = ["finished"]


def finished(
    model: nn.Module, record: Record, passes: Sequence[Pass], *, inputs: Sequence[Inputs], ranks: Ranks | None
) -> nn.Module:
    """Return the optimized model after the last passes of the run have finished it.

    Args:
        model: the optimized model, which no user has yet; it is changed.
        record: of it.
        passes: all passes of this run; those that finish nothing are passed over.
        inputs: example calls; on the first one the outputs before and after are compared. None: nothing is compared.
        ranks: those that do the same.

    Raises:
        PassError: a pass raises, on any rank, or changes the outputs.
    """
    decisions = record.plan.last(len(passes)).decisions
    for step, pass_ in enumerate(passes):
        planned = [d for d in decisions if pass_.finishes and d.step == step and d.status == "applied"]
        if planned:
            model = on_all_ranks(ranks, partial(_finish, model, pass_, planned, inputs))
            vars(model).setdefault(RECORD_KEY, record)
    return model


def _finish(model: nn.Module, pass_: Pass, planned: Sequence[Decision], inputs: Sequence[Inputs]) -> nn.Module:
    program = Program(model)
    sites = [Site.from_json(program, decision.site) for decision in planned]
    compares = bool(inputs) and not is_on_meta(model)
    before = _outputs(model, inputs[0]) if compares else []
    try:
        result = pass_.finalize(model, sites)
    except FxoptError:
        raise
    except Exception as error:
        raise PassError(f"pass '{pass_.name}': finalize raised {type(error).__name__}: {error}") from error
    if compares and result is model:
        problem = _difference(before, _outputs(result, inputs[0]), pass_)
        if problem:
            shared = pass_.goal is Goal.PARALLEL and pass_.numerics is not Numerics.APPROXIMATE
            step = "give all processes the same example inputs, or leave it out" if shared else "leave it out"
            raise PassError(
                f"pass '{pass_.name}' changed what the model gives: {problem}; your model is as it was: {step}"
            )
    return result


def _outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Return what an evaluation of the model gives; in training, dropout would draw otherwise in parts of a model."""
    given = copy_inputs(inputs)
    with preserved(model), in_phase(model, training=False), torch.no_grad():
        result: Any = model(*given.args, **given.kwargs)
        for module in all_modules(model):
            shard_again(module)  # what FSDP2 has gathered must not be there when the tensors are put back
        return [tensor.detach().clone() for tensor in tensors_in(result)]


def _difference(before: Sequence[Tensor], after: Sequence[Tensor], pass_: Pass) -> str:
    if len(before) != len(after):
        return f"{len(before)} tensors before, {len(after)} after"
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        problem = form_problem(old, new) or distance(old, new, _tolerance(old, pass_)).problem
        if problem:
            return f"output {number} {problem}"
    return ""


def _tolerance(tensor: Tensor, pass_: Pass) -> Tolerance:
    """Allow the pass's error budget; of a pass that keeps the function half of the digits."""
    if pass_.numerics is not Numerics.APPROXIMATE or not (tensor.is_floating_point() or tensor.is_complex()):
        return half_the_digits(tensor)
    return Tolerance(0.0, scale_of(tensor) * pass_.error_budget)

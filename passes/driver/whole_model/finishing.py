"""What passes do to the finished model: shard it, replicate it, cut it into stages, on all ranks or on none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....compat import all_modules
from ....compat.distributed import shard_again
from ....errors import FxoptError, PassError
from ....runtime.record import Decision, Record, record_of
from ....runtime.state import RECORD_KEY, StateMap, StateStep
from ....runtime.values import tensors_in
from ....tracing.examples import Inputs
from ....tracing.isolation import in_phase, preserved
from ....tracing.program import Program, is_on_meta
from ....tracing.recording import copy_inputs
from ...contract import Pass
from ...pipeline import Ranks, heard_of_any, on_all_ranks
from ...sites import Goal, Numerics, Site
from ...verification import Tolerance, distance, form_difference, half_the_digits, scale_of
from .first_step import FirstStep

__all__ = ["finished"]


def finished(
    model: nn.Module, record: Record, passes: Sequence[Pass], *, inputs: Sequence[Inputs], ranks: Ranks | None
) -> nn.Module:
    """Return the optimized model, which is changed, after the last passes of the run have finished it, on all ranks.

    Outputs on the first of `inputs` and gradients of a step are compared. Raises PassError where a pass raises or errs.
    """
    plan = record.plan.last(len(passes))
    for step, pass_ in enumerate(passes):
        planned = [d for d in plan.decisions if pass_.finishes and d.step == step and d.status == "applied"]
        if planned:
            finishing = _Finishing(pass_, planned, inputs, ranks, trains=plan.phase == "train")
            given = model
            model, record.finishing[pass_.name] = finishing.done(given)
            record = vars(given).get(RECORD_KEY, record)  # a pass may have moved tensors
            vars(model).setdefault(RECORD_KEY, record)
    return model


@dataclass
class _Finishing:
    """One pass that finishes the model, what it decided on, and whether the model was optimized for training."""

    pass_: Pass
    planned: Sequence[Decision]
    inputs: Sequence[Inputs]
    ranks: Ranks | None
    trains: bool

    def done(self, model: nn.Module) -> tuple[nn.Module, str]:
        """Return the finished model, and in words what was compared."""
        reason = heard_of_any(self.ranks, self._obstacle(model))
        if reason:
            return on_all_ranks(self.ranks, lambda: self._finalized(model)), f"not compared: {reason}"
        before = on_all_ranks(self.ranks, lambda: _outputs(model, self.inputs[0]))
        step, known = self._first_step(model), _steps_of(model)
        result = on_all_ranks(self.ranks, lambda: self._finalized(model))
        if result is not model:
            return result, f"not compared: a {type(result).__name__} stands for the model"
        on_all_ranks(self.ranks, lambda: self._check_outputs(before, result))
        if isinstance(step, FirstStep):
            step.rename(StateMap(_steps_of(result)[len(known) :]))
            on_all_ranks(self.ranks, lambda: self._check_step(step, result))
            return result, "outputs and the gradients of a first step are as before"
        return result, "outputs are as before" + (f"; gradients were not compared: {step}" if step else "")

    def _obstacle(self, model: nn.Module) -> str:
        if not self.inputs:
            return "no example inputs, or verify=False"
        return "the model is on the meta device" if is_on_meta(model) else ""

    def _first_step(self, model: nn.Module) -> FirstStep | str:
        """Return a step of training before the pass, or why there is none; "" where none is wanted."""
        pass_ = self.pass_
        keeps = pass_.trains_by_call and pass_.phase.covers_training and pass_.numerics is not Numerics.SEMANTIC
        if not (self.trains and keeps and any(parameter.requires_grad for parameter in model.parameters())):
            return ""
        return FirstStep.of(model, pass_, self.inputs[0], self.ranks)

    def _finalized(self, model: nn.Module) -> nn.Module:
        program = Program(model)
        sites = [Site.from_json(program, decision.site) for decision in self.planned]
        try:
            return self.pass_.finalize(model, sites)
        except FxoptError:
            raise
        except Exception as error:
            raise PassError(f"pass '{self.pass_.name}': finalize raised {type(error).__name__}: {error}") from error

    def _check_outputs(self, before: Sequence[Tensor], model: nn.Module) -> None:
        reason = _difference(before, _outputs(model, self.inputs[0]), self.pass_)
        if reason:
            shared = self.pass_.goal is Goal.PARALLEL and self.pass_.numerics is not Numerics.APPROXIMATE
            step = "give all processes the same example inputs, or leave it out" if shared else "leave it out"
            raise PassError(
                f"pass '{self.pass_.name}' changed what the model gives: {reason}; your model is as it was: {step}"
            )

    def _check_step(self, step: FirstStep, model: nn.Module) -> None:
        reason = step.reason_against(model)
        if reason:
            raise PassError(
                f"pass '{self.pass_.name}' changed how the model trains: in the first step {reason}; your model is "
                "unchanged; leave the pass out, or give verify=False if this is intended"
            )


def _steps_of(model: nn.Module) -> tuple[StateStep, ...]:
    record = record_of(model)
    return () if record is None else record.state_map.steps


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
        reason = form_difference(old, new) or distance(old, new, _tolerance(old, pass_)).reason
        if reason:
            return f"output {number} {reason}"
    return ""


def _tolerance(tensor: Tensor, pass_: Pass) -> Tolerance:
    """Allow the pass's error budget; of a pass that keeps the function half of the digits."""
    if pass_.numerics is not Numerics.APPROXIMATE or not (tensor.is_floating_point() or tensor.is_complex()):
        return half_the_digits(tensor)
    return Tolerance(0.0, scale_of(tensor) * pass_.error_budget)

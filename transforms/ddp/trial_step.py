"""What the example calls show of a training step: which parameters get gradients, which buffers a forward writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ...errors import one_line
from ...layers.sync_batch_norm import SyncBatchNorm
from ...passes.verification import is_on_meta
from ...runtime.values import RandomState, tensors_in
from ...tracing.examples import Inputs
from ...tracing.isolation import copied_module, in_phase
from ...tracing.program import Program
from ...tracing.recording import copy_inputs

__all__ = ["TrialStep", "run_trial_step"]


@dataclass(frozen=True)
class TrialStep:
    """What was seen in the example calls.

    Attributes:
        unused: the names of trained parameters that no gradient reaches.
        written: the names of buffers that differ between processes after a forward in training.
        failed: why example calls said nothing: all parameters count as used, then, and all buffers as written.
    """

    unused: tuple[str, ...]
    written: tuple[str, ...]
    failed: tuple[str, ...] = ()


def run_trial_step(program: Program) -> TrialStep:
    """Run the example calls forward and backward; without any, all buffers count as written, and nothing as unused."""
    model, buffers = program.model, _own_buffers(program.model)
    if not program.whole_calls or is_on_meta(model):
        return TrialStep((), tuple(buffers))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    used, written, failed = set[str](), set[str](), list[str]()
    for number, inputs in enumerate(program.whole_calls):
        try:
            reached, changed = _step(model, inputs, trained)
        except Exception as error:  # an example for evaluation need not do for training: one row and a batch norm, say
            reached, changed = set(trained), set(buffers)
            failed.append(f"example call {number} raised {type(error).__name__} in training: {one_line(error)}")
        used |= reached
        written |= changed
    unused = tuple(name for name in trained if name not in used)
    return TrialStep(unused, tuple(name for name in buffers if name in written), tuple(failed))


def _own_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that processes have of their own; synchronized batch norms have the same everywhere."""
    shared = {id(b) for module in model.modules() if isinstance(module, SyncBatchNorm) for b in module.buffers()}
    return {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in shared}


def _step(model: nn.Module, inputs: Inputs, trained: Mapping[str, nn.Parameter]) -> tuple[set[str], set[str]]:
    """Return the names of the parameters that one call sends gradients to, and of the buffers that it writes."""
    # On a copy with the same parameters: what a forward in training writes is not put back without a trace.
    model = copied_module(model, {id(parameter): parameter for parameter in model.parameters()})
    given, before = copy_inputs(inputs), {name: buffer.clone() for name, buffer in model.named_buffers()}
    random = RandomState()
    try:
        with in_phase(model, training=True), torch.enable_grad():
            loss = _sum(tensors_in(model(*given.args, **given.kwargs)))
            values = list(trained.values()) if loss is not None else []
            found = torch.autograd.grad(loss, values, allow_unused=True) if loss is not None and values else ()
    finally:
        random.restore()
    now = dict(model.named_buffers())
    gradients = dict(zip(trained, cast("tuple[Tensor | None, ...]", found), strict=False))
    reached = {name for name, gradient in gradients.items() if gradient is not None}
    return reached, {name for name, old in before.items() if name not in now or not torch.equal(now[name], old)}


def _sum(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return something that every result with a gradient goes into."""
    sums = [tensor.abs().sum().double() for tensor in tensors if tensor.requires_grad]
    return torch.stack(sums).sum() if sums else None

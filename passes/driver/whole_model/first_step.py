"""Whether the finished model trains as it did before: the gradients of one step on an example call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ....compat import all_modules
from ....compat.distributed import shard_again
from ....errors import one_line
from ....runtime.graphs import trial_step
from ....runtime.state import StateMap
from ....runtime.values import RandomState, tensors_in, whole_tensor
from ....tracing.examples import Inputs
from ....tracing.isolation import in_phase, preserved
from ....tracing.recording import copy_inputs
from ...contract import Pass
from ...pipeline import Ranks, heard_of_any
from ...sites import Numerics
from ...verification import distance, form_difference, gradients_within

__all__ = ["FirstStep"]

_SHARE = 0.01
"""What a gradient may be off by, relative to its scale, where the pass keeps the function; or half of the digits."""
_ROUGH_SHARE = 0.2
"""The same where it computes in another dtype. A gradient that is not averaged is off by a third at the least."""
_SEED = 0


@dataclass
class FirstStep:
    """One training step, made before a pass finishes the model, to be compared with one after.

    Where gradients are averaged, each rank weights its loss otherwise: one left out of the average then differs.
    """

    pass_: Pass
    call: Inputs
    ranks: Ranks | None
    training: bool
    expected: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, pass_: Pass, call: Inputs, ranks: Ranks | None) -> FirstStep | str:
        """Return the step, or why there is none; all ranks call this."""
        step, reason = cls(pass_, call, ranks, True, {}), ""
        try:
            gradients, draws = step._gradients(model)
            if draws and ranks is not None and pass_.rows(ranks.rank, ranks.size)[1] < ranks.size:
                # Of a tensor that is split, each rank draws its own part of a dropout: without any, then.
                step.training = False
                gradients, _ = step._gradients(model)
            step.expected = {name: gradient for name, gradient in gradients.items() if gradient is not None}
            reason = "" if step.expected else "no gradient reaches a parameter in the first example call"
        except Exception as error:  # whatever the user's code raises: an example for evaluation may not do for training
            reason = f"the first example call raised {type(error).__name__} in training: {one_line(error)}"
        reason = heard_of_any(ranks, reason)
        if reason:
            return reason
        step._average(model)
        return step

    def rename(self, moved: StateMap) -> None:
        """Let the expected gradients be those of tensors that the pass has moved."""
        self.expected = moved.forward(self.expected, strict=False)

    def reason_against(self, model: nn.Module) -> str:
        """Return what is wrong with the gradients of the finished model, or ""."""
        found, _ = self._gradients(model)
        tolerances, problem = gradients_within(self.expected, self._share), ""
        for name, expected in self.expected.items():
            # All of them on every rank: whole tensors are gathered from all.
            gradient = found.get(name)
            actual = torch.zeros_like(expected) if gradient is None else whole_tensor(gradient)
            wrong = form_difference(expected, actual) or distance(expected, actual, tolerances[name]).reason
            problem = problem or (f"the gradient of '{name}' {wrong}" if wrong else "")
        return problem

    @property
    def _share(self) -> float:
        if self.pass_.numerics is Numerics.APPROXIMATE:
            return _ROUGH_SHARE
        digits = [torch.finfo(gradient.dtype).eps for gradient in self.expected.values()]
        return max(_SHARE, max(digits, default=0.0) ** 0.5)

    @property
    def _weight(self) -> float:
        """Return what this rank's loss is multiplied by: the mean over all ranks is one."""
        if self.ranks is None:
            return 1.0
        number, count = self.pass_.rows(self.ranks.rank, self.ranks.size)
        return 2.0 * (number + 1) / (count + 1)

    def _average(self, model: nn.Module) -> None:
        """Make the expected gradients the means over all ranks, where the pass lets these be averaged."""
        if self.ranks is None or self.pass_.rows(self.ranks.rank, self.ranks.size)[1] == 1:
            return
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for name, parameter in trained.items():
            gradient = self.expected.pop(name, None)
            mean = torch.zeros_like(parameter) if gradient is None else gradient.div_(self.ranks.size)
            distributed.all_reduce(mean)
            self.expected[name] = mean.detach()

    def _gradients(self, model: nn.Module) -> tuple[Mapping[str, Tensor | None], bool]:
        """Return the gradients of a step by parameter, and whether it drew random numbers; the model is as before."""
        given = copy_inputs(self.call)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        with preserved(model), trial_step(), in_phase(model, self.training), torch.enable_grad():
            for parameter in model.parameters():
                parameter.grad = None
            start = RandomState()
            result: Any = model(*given.args, **given.kwargs)
            draws = start.has_drawn()
            outputs = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [_upstream(output) * self._weight for output in outputs])
            for module in all_modules(model):
                shard_again(module)  # what FSDP2 has gathered must not be there when the tensors are put back
            return {name: parameter.grad for name, parameter in trained.items()}, draws


def _upstream(output: Tensor) -> Tensor:
    """Return a gradient of the mean of an output, its elements weighted: of a softmax the plain mean has none."""
    generator = torch.Generator().manual_seed(_SEED)
    weights = torch.rand(output.shape, generator=generator) + 0.5
    return (weights / max(1, output.numel())).to(output.device, output.dtype)

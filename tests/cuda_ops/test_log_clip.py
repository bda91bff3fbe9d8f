"""The gradient of `log_clip`, and how users wrote it before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.cuda_ops import log_clip


class LogClip(torch.autograd.Function):
    """As users write it."""

    @staticmethod
    def forward(ctx, x: Tensor, minimum: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.minimum = minimum
        return x.clamp(min=minimum).log()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.saved_tensors[0].clamp(min=ctx.minimum), None


def test_it_computes_what_the_function_of_users_does():
    x = torch.tensor([-1.0, 0.0, 0.05, 0.1, 0.5, 3.0, float("nan"), float("inf")], requires_grad=True)
    for got, expected in ((log_clip(x, 0.1), LogClip.apply(x, 0.1)),):
        torch.testing.assert_close(got, expected, equal_nan=True, rtol=0, atol=0)
        gradients = [torch.autograd.grad(each.sum(), x)[0] for each in (got, expected)]
        torch.testing.assert_close(*gradients, equal_nan=True, rtol=0, atol=0)


def test_a_clipped_input_has_a_gradient():
    x = torch.tensor([-1.0, 0.0, 0.25, 4.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(log_clip(x, 0.5).sum(), x)
    assert gradient.tolist() == [2.0, 2.0, 2.0, 0.25]


@pytest.mark.parametrize("clip", [log_clip, LogClip.apply])
def test_either_spelling_is_one_node_of_a_capture(clip):
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return -clip(x.sigmoid(), 0.25).mean()

    model, x = Loss(), torch.randn(6, requires_grad=True)
    program = fxopt.capture(model, x)
    functions = [node for node in program.graphs[""].nodes if node.op.startswith("call")]
    assert len(functions) == 4
    expected = torch.autograd.grad(model(x), x)
    torch.testing.assert_close(torch.autograd.grad(program.model(x), x), expected, rtol=0, atol=0)

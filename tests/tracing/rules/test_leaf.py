"""Functions that a user declares leaves: one node each, whatever they do inside."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.cuda_ops import Kernel

torch.manual_seed(0)
X = torch.randn(6, 4)


def by_numpy(x: Tensor, scale: float = 1.0) -> Tensor:
    """Compute where tracing cannot follow, as a function in C does."""
    if type(x) is not Tensor:
        raise TypeError("incompatible function arguments")
    return torch.from_numpy(np.sign(x.detach().numpy()) * scale)


def doubled(x: Tensor) -> None:
    x.detach().numpy()[...] *= 2
    torch.autograd.graph.increment_version(x)


class LogClip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, least):
        ctx.save_for_backward(x)
        ctx.least = least
        return x.clamp(min=least).log()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / x.clamp(min=ctx.least), None


signs, doubles, log_clip = fxopt.leaf(by_numpy), fxopt.leaf(doubled), fxopt.leaf(LogClip)


class Net(nn.Module):
    def __init__(self, call=signs):
        super().__init__()
        self.call, self.linear = call, nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y * self.call(y, scale=0.5)


class Writing(Net):
    def forward(self, x):
        y = self.linear(x)
        z = y + 0
        doubles(z)
        return y + z + (y + 0)


class Clipping(Net):
    def forward(self, x):
        return LogClip.apply(self.linear(x).exp(), 1e-3).relu()


def test_a_declared_function_is_one_node():
    assert "" not in fxopt.capture(Net(by_numpy), X).graphs
    program = fxopt.capture(Net(), X)
    (node,) = program.graphs[""].find_nodes(op="call_function", target=signs)
    assert node.kwargs == {"scale": 0.5} and node.meta["writes"] is False
    assert node.name == "by_numpy" and signs.__doc__ == by_numpy.__doc__
    for model in (program.model, copy.deepcopy(program.model), pickle.loads(pickle.dumps(program.model))):
        torch.testing.assert_close(model(X[:3]), Net.forward(model, X[:3]))


def test_it_runs_as_it_is_outside_and_in_an_optimized_model():
    assert torch.equal(signs(X), by_numpy(X)) and fxopt.leaf(signs) is signs
    model = nn.Sequential(Net(), nn.BatchNorm1d(4), Net()).eval()
    fast = fxopt.optimize(model, "inference", example_inputs=X, measure=False)
    assert any(node.target == signs for graph in fxopt.graphs(fast).values() for node in graph.nodes)
    torch.testing.assert_close(fast(X[:2]), model(X[:2]))


def test_what_writes_into_its_arguments_is_seen():
    model = Writing()
    fast = fxopt.optimize(model, "eliminate_common_subexpressions,eliminate_dead_code", example_inputs=X, measure=False)
    assert [node.meta["writes"] for node in fxopt.graphs(fast)[""].find_nodes(op="call_function", target=doubles)] == [
        True
    ]
    torch.testing.assert_close(fast(X), model(X))


def test_an_autograd_function_may_be_a_spelling_of_an_operator():
    def clipped(x: Tensor, least: float) -> Tensor:
        return log_clip(x, least)

    kernel = Kernel("clip_and_log", lambda x, least: fxopt.cuda_ops.log_clip(x, least), (clipped,))
    handle = fxopt.register_operator(fxopt.OpInfo("leaf_log_clip", functions=(log_clip,), pure=True, random=False))
    try:
        model = Clipping()
        passes = [fxopt.SwapKernels(kernels=[kernel])]
        fast = fxopt.optimize(model, passes, example_inputs=X, measure=False)
    finally:
        handle.remove()
    assert [decision.status for decision in fxopt.plan(fast).decisions] == ["applied"], fxopt.plan(fast)
    given, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    found, expected = fast(given), model(other)
    torch.testing.assert_close(found, expected)
    for one, two in zip(
        torch.autograd.grad(found.sum(), given), torch.autograd.grad(expected.sum(), other), strict=True
    ):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("wrong", [3, nn.ReLU(), Tensor])
def test_what_is_no_function_is_refused(wrong):
    with pytest.raises(fxopt.UsageError, match="give a function, or a subclass of"):
        fxopt.leaf(wrong)

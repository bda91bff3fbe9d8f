"""Long graphs: nothing recurses once per node, and nothing is asked twice as often with each node."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import Tensor, nn

import fxopt

LENGTH = 5000
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x
        for _ in range(LENGTH // 2):
            y = torch.tanh(y) + x
        return y


class Sizes(nn.Module):
    """Compute one integer in many steps, each of which reads the last one twice."""

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[0]
        for _ in range(LENGTH // 4):
            size = (size + size) // 2
        return x * 2 if size > 0 else x


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scale = torch.ones(4)
        for _ in range(LENGTH // 2):
            scale = scale * 1.0001
        return x * scale


class Constants(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for number in range(500):
            x = x + torch.arange(4) * float(number)
        return x


def test_a_long_chain_is_captured_cleaned_copied_and_restored() -> None:
    model = Chain().eval()
    fast = fxopt.optimize(model, passes="inference", example_inputs=(X,))
    assert len(fxopt.graphs(fast)[""].nodes) == LENGTH + 2
    for version in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), fxopt.restore(fast)):
        assert torch.equal(version(X), model(X))


def test_a_long_chain_trains() -> None:
    model = Chain()
    fast = fxopt.optimize(model, passes="eliminate_dead_code", example_inputs=(X,))
    gradients = [torch.autograd.grad(m(x).sum(), x)[0] for m in (model, fast) for x in [X.clone().requires_grad_()]]
    assert torch.equal(*gradients)


def test_a_size_made_in_many_steps_is_checked_where_it_is_computed() -> None:
    program = fxopt.capture(Sizes(), (X,))
    assert not program.opaque
    assert torch.equal(program.model(X), X * 2)
    assert torch.equal(program.model(X[:1]), X[:1] * 2)
    empty = torch.ones(0, 4)
    assert program.model(empty).shape == (0, 4)


def test_a_constant_made_in_many_steps_is_folded_once() -> None:
    fast = fxopt.optimize(Constant(), passes="fold_constants", example_inputs=(X,))
    assert [node.op for node in fxopt.graphs(fast)[""].nodes] == ["placeholder", "get_attr", "call_function", "output"]
    assert torch.equal(fast(X), Constant()(X))


def test_many_constants_of_one_graph_are_one_site() -> None:
    fast = fxopt.optimize(Constants(), passes="fold_constants", example_inputs=(X,))
    (decision,) = fxopt.plan(fast).decisions
    assert (decision.status, decision.detail) == ("applied", "500 constants, 2,000 elements")
    assert torch.equal(fast(X), Constants()(X))

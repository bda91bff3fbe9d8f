"""A custom autograd function is one node, with the backward that it came with."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import Function

import fxopt
from fxopt.runtime.values import FunctionCall

X = (torch.randn(3, 6, generator=torch.Generator().manual_seed(0)),)
X2 = (torch.randn(5, 6, generator=torch.Generator().manual_seed(1)),)


class Straight(Function):
    """Two results, a saved tensor, and a backward that is not its forward's derivative."""

    @staticmethod
    def forward(ctx, x, factor=2):
        ctx.save_for_backward(x)
        return x.sign() * factor, x.abs()

    @staticmethod
    def backward(ctx, first, second):
        return first + second * ctx.saved_tensors[0], None


class Scale(Function):
    """The form that `torch.func` can take, which has defaults."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, factor=3.0):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor * 10, None


class Double(Function):
    """It writes into its argument."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


straight = Straight.apply


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.rand(6))
        self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))

    def forward(self, x):
        a, b = straight(self.linear(x))
        return Scale.apply(a) + b * Scale.apply(self.weight), Double.apply(a + 1)


class Twice(Net):
    """The same call twice, and one that nobody reads: either may do more than give a value."""

    def forward(self, x):
        y = self.linear(x)
        Scale.apply(y)
        return torch.relu(Scale.apply(y)) + torch.relu(Scale.apply(y))


class Heads(Net):
    def forward(self, x):
        x = Scale.apply(x)
        return Scale.apply(torch.cat([head(x) for head in self.heads], -1))


class UnderContext(Net):
    def forward(self, x):
        with torch.no_grad():
            y = Scale.apply(self.linear(x))
        return y * self.weight


def calls(graph):
    return [node for node in graph.nodes if isinstance(node.target, FunctionCall)]


@pytest.mark.parametrize("kind", [Net, Twice, Heads, UnderContext])
def test_equal_in_values_and_gradients(kind, agree, misses):
    assert misses(agree(kind(), X, X2)) == 0


def test_text_of_the_graph():
    graph = fxopt.capture(Net(), X).graphs[""]
    assert "%scale_apply : [num_users=1] = call_function[target=" in str(graph)
    assert "Scale.apply](args = (%getitem, 3.0), kwargs = {})" in str(graph)
    assert [node.meta["writes"] for node in calls(graph)] == [False, False, False, True]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_copies_pickles_and_compiles():
    model = Net()
    captured = fxopt.capture(model, X).model
    for copied in (copy.deepcopy(captured), pickle.loads(pickle.dumps(captured))):
        for given, expected in zip(copied(*X), model(*X), strict=True):
            assert torch.equal(given, expected)
    heads = Heads()
    compiled = torch.compile(fxopt.capture(heads, X).model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*X), heads(*X))


def test_calls_are_neither_merged_nor_removed():
    model = Twice()
    passes = ["eliminate_common_subexpressions", "eliminate_dead_code"]
    fast = fxopt.optimize(model, passes=passes, example_inputs=X, measure=False)
    assert len(calls(fxopt.graphs(fast)[""])) == 3
    torch.testing.assert_close(fast(*X), model(*X))


def test_members_before_one_are_fused():
    model = Heads()
    fast = fxopt.optimize(model, passes="fuse_ensembles{lowering=bmm}", example_inputs=X, measure=False)
    assert [decision.status for decision in fxopt.plan(fast).decisions] == ["applied"]
    assert len(calls(fxopt.graphs(fast)[""])) == 2
    for copied in (model, fast):
        copied.zero_grad()
        copied(*X).sum().backward()
    gradient = fxopt.state_dict(fast)
    assert gradient.keys() == model.state_dict().keys()
    torch.testing.assert_close(fast(*X), model(*X))
    torch.testing.assert_close(fast.linear.weight.grad, model.linear.weight.grad)

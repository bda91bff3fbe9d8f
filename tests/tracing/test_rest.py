"""What no pass has changed runs its own forward; its graphs stay for who asks, and for later passes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import fxopt
from fxopt.tracing.captured import capture_of
from fxopt.tracing.resting import rest

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 2.0

    def forward(self, x):
        return self.linear(x) * self.scale


class Wasteful(Plain):
    def forward(self, x):
        x.exp()
        return self.linear(x).tanh()


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain, self.wasteful = Plain(), Wasteful()

    def forward(self, x):
        return self.wasteful(self.plain(x))


def forward_of(module: nn.Module) -> object:
    return type(module).forward


@pytest.fixture
def fast() -> nn.Module:
    return fxopt.optimize(Both().eval(), "eliminate_dead_code", example_inputs=(X,))


def test_only_what_was_rewritten_runs_from_its_graph(fast: nn.Module):
    assert forward_of(fast) is Both.forward
    assert forward_of(fast.plain) is Plain.forward
    assert forward_of(fast.wasteful) is not Wasteful.forward
    assert list(fxopt.graphs(fast)) == ["", "plain", "wasteful"]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_rest_alike(fast: nn.Module, again):
    copied = again(fast)
    assert forward_of(copied.plain) is Plain.forward
    assert forward_of(copied.wasteful) is not Wasteful.forward
    assert torch.equal(copied(X), fast(X))


def test_a_later_pass_wakes_what_it_rewrites(fast: nn.Module):
    def negate_twice(graph_module):
        output = graph_module.graph.output_node()
        with graph_module.graph.inserting_before(output):
            twice = graph_module.graph.call_function(torch.neg, output.args)
            output.args = (graph_module.graph.call_function(torch.neg, (twice,)),)
        return graph_module

    again = fxopt.optimize(fast, negate_twice, example_inputs=(X,))
    assert all("neg" in str(graph) for graph in fxopt.graphs(again).values())
    assert forward_of(again.plain) is not Plain.forward
    assert "exp" not in str(fxopt.graphs(again)["wasteful"])
    assert torch.equal(again(X), fast(X))
    assert forward_of(fast.plain) is Plain.forward


def test_what_was_rewritten_before_stays_so(fast: nn.Module):
    again = fxopt.optimize(fast, "eliminate_common_subexpressions", example_inputs=(X,))
    assert forward_of(again.plain) is Plain.forward
    assert forward_of(again.wasteful) is not Wasteful.forward
    assert "exp" not in str(fxopt.graphs(again)["wasteful"])


def test_setting_an_attribute_drops_the_graph_that_read_it(fast: nn.Module):
    fast.plain.scale = 3.0
    assert torch.equal(fast.plain(X), fast.plain.linear(X) * 3)
    assert forward_of(fast.plain) is Plain.forward


def test_a_resting_model_is_saved_with_its_graphs(fast: nn.Module, tmp_path):
    fxopt.save(fast, tmp_path / "m", kind="standalone")
    torch.testing.assert_close(fxopt.load(tmp_path / "m")(X), fast(X))


def test_equal_modules_go_on_sharing_their_graphs():
    model = fxopt.capture(nn.Sequential(*(Plain() for _ in range(2))), (X,)).model
    rest(model)
    assert capture_of(model[0]) is capture_of(model[1])
    assert capture_of(model[0]).resting
    woken = fxopt.capture(model, (X,)).model
    assert capture_of(woken[0]) is capture_of(woken[1])
    assert not capture_of(woken[0]).resting
    assert capture_of(model[0]).resting

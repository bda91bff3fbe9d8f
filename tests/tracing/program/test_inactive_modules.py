"""What no pass has changed runs its own forward; its graphs stay for who asks, and for later passes."""

from __future__ import annotations

import copy
import operator
import pickle

import pytest
import torch
from torch import nn

import fxopt
from fxopt.compat import all_modules
from fxopt.runtime.graphs import capture_of, recompile, with_graph
from fxopt.tracing.program import deactivate

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


def test_a_module_that_gets_another_graph_is_active_again():
    program = fxopt.capture(Plain(), (X,))
    deactivate(program.names.distinct)
    graph = copy.deepcopy(program.graphs[""])
    (scaled,) = (node for node in graph.nodes if node.target is operator.mul)
    scaled.args = scaled.args[0], 3.0
    with_graph(program.model, 0, graph)
    recompile(program.model)
    torch.testing.assert_close(program.model(X), program.model.linear(X) * 3.0)


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


def test_a_resting_model_is_exported(fast: nn.Module, tmp_path):
    fxopt.export(fast, tmp_path / "m", (X,))
    torch.testing.assert_close(fxopt.load(tmp_path / "m")(X), fast(X))


def test_equal_modules_go_on_sharing_their_graphs():
    model = fxopt.capture(nn.Sequential(*(Plain() for _ in range(2))), (X,)).model
    deactivate(all_modules(model))
    assert capture_of(model[0]) is capture_of(model[1])
    assert capture_of(model[0]).inactive
    woken = fxopt.capture(model, (X,)).model
    assert capture_of(woken[0]) is capture_of(woken[1])
    assert not capture_of(woken[0]).inactive
    assert capture_of(model[0]).inactive


class Reading(nn.Module):
    """Reads attributes of every kind."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale, self.sizes, self.extra = 2.0, [2, 3], None
        self.activation = torch.tanh
        self.register_parameter("bias", None)

    def forward(self, x):
        y = self.linear(x) if isinstance(self.linear, nn.Linear) else x - self.linear(x)
        y = self.activation(y) * self.scale + len(self.sizes)
        y = y if self.bias is None else y + self.bias
        return y if self.extra is None else y - 7


CHANGES = {
    "value": lambda m: setattr(m, "scale", 5.0),
    "list": lambda m: setattr(m, "sizes", [1]),
    "function": lambda m: setattr(m, "activation", torch.relu),
    "child": lambda m: setattr(m, "linear", nn.Identity()),
    "parameter": lambda m: setattr(m, "bias", nn.Parameter(torch.ones(4))),
    "registered": lambda m: m.register_parameter("bias", nn.Parameter(torch.ones(4))),
    "found": lambda m: setattr(m, "extra", 1),
    "by hand": lambda m: m.__dict__.update(scale=5.0),
}
COPIES = {
    "itself": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "optimized": lambda model: fxopt.optimize(model, "eliminate_dead_code", example_inputs=(X,)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_graphs_at_rest_count_while_what_they_read_is_the_same(copied, change):
    model = copied(fxopt.optimize(nn.Sequential(Reading()), "eliminate_dead_code", example_inputs=(X,)))
    assert type(model[0]) is Reading
    assert list(fxopt.graphs(model)) == ["", "0"]
    change(model[0])
    assert list(fxopt.graphs(model)) == [""]
    plain = Reading()
    change(plain)
    plain.load_state_dict(model[0].state_dict())
    assert torch.equal(model(X), plain(X))
    again = fxopt.optimize(model, "eliminate_dead_code", example_inputs=(X,))
    assert list(fxopt.graphs(again)) == ["", "0"]
    assert torch.equal(again(X), plain(X))
    assert torch.equal(fxopt.capture(model, (X,)).model(X), plain(X))


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_another_child_of_the_same_kind_keeps_the_graphs(copied):
    model = copied(fxopt.optimize(nn.Sequential(Reading()), "eliminate_dead_code", example_inputs=(X,)))
    model[0].linear, model[0].scale, model[0].unread = nn.Linear(4, 4), 1.0 + 1.0, "anything"
    assert list(fxopt.graphs(model)) == ["", "0"]


def test_in_place_the_graphs_stay_too():
    model = nn.Sequential(Reading())
    fxopt.optimize(model, "eliminate_dead_code", example_inputs=(X,), inplace=True)
    assert list(fxopt.graphs(model)) == ["", "0"]
    model[0].scale = 3.0
    assert list(fxopt.graphs(model)) == [""]


def test_a_parametrized_module_is_no_longer_what_its_graphs_say():
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    model = fxopt.optimize(nn.Sequential(Own()), "eliminate_dead_code", example_inputs=(X,))
    nn.utils.parametrize.register_parametrization(model[0], "weight", Doubled())
    expected = X * 2 * model[0].parametrizations.weight.original
    assert torch.equal(model(X), expected)
    assert "0" not in fxopt.graphs(model)
    assert torch.equal(fxopt.optimize(model, "eliminate_dead_code", example_inputs=(X,))(X), expected)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight

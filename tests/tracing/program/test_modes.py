"""`self.training`, buffers, in-place changes and random state."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxopt.errors import InputError
from fxopt.tracing.program import capture_program

X = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),)
X2 = (torch.randn(7, 6, generator=torch.Generator().manual_seed(1)),)


class SymbolicTraining(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, self.training)


def test_training_as_a_value_stays_symbolic(agree, misses):
    program = agree(SymbolicTraining(), X, X2)
    assert misses(program) == 0
    assert len(program.captures[""].specializations) == 1
    assert [n.target for n in program.graphs[""].nodes if n.op == "get_attr"] == ["training"]


class DecidingTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)

    def forward(self, x):
        if self.training:
            return self.a(x) + torch.randn_like(x)
        return self.b(x).relu()


@pytest.mark.parametrize("training", [True, False])
def test_training_that_decides_gives_two_graphs(agree, misses, training):
    program = agree(DecidingTraining().train(training), X, X2)
    assert misses(program) == 0
    assert set(program.graphs) == {"", "#1"}
    assert ("randn_like" in str(program.graphs[""])) is training
    assert ("randn_like" in str(program.graphs["#1"])) is not training


def test_half_train_half_eval(agree, misses):
    model = nn.Sequential(DecidingTraining(), nn.BatchNorm1d(6), DecidingTraining())
    model[0].eval()
    model[1].eval()
    captured = capture_program(model, X).model
    assert [m.training for m in (captured, *captured)] == [True, False, False, True]
    agree(model, X, X2)


class CallsByMode(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = DecidingTraining(), SymbolicTraining()

    def forward(self, x):
        return self.b(self.a(x)) if self.training else self.a(x)


@pytest.mark.parametrize("training", [True, False])
def test_children_that_one_mode_calls_have_graphs(agree, misses, training):
    program = agree(CallsByMode().train(training), X, X2)
    assert misses(program) == 0
    assert set(program.captures) == {"", "a", "b"}


class GradDecides(nn.Module):
    def forward(self, x):
        if torch.is_grad_enabled():
            return x * 2
        return x * 3


def test_grad_mode_that_decides_gives_two_graphs(misses):
    program = capture_program(GradDecides(), X)
    assert torch.equal(program.model(*X), X[0] * 2)
    with torch.no_grad():
        assert torch.equal(program.model(*X), X[0] * 3)
    assert misses(program) == 0


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        self.count += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.norm(x) - self.mean / self.count


def test_buffers_changed_in_place_are_nodes(agree):
    model = Counts()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    program = capture_program(model, X)
    assert not program.opaque
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    agree(Counts(), X, X2)


class ReassignsBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(6))
        self.inner = SymbolicTraining()

    def forward(self, x):
        self.state = 0.5 * self.state + x.mean(0).detach()
        return self.inner(x) + self.state


def test_buffers_that_are_assigned_stay_buffers(agree, misses):
    model = ReassignsBuffer()
    program = agree(model, X, X2)
    assert misses(program) == 0
    assert torch.equal(program.model.state, model.state)
    assert list(program.model.state_dict()) == list(model.state_dict())


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x, scratch):
        y = self.linear(x)
        y += 1
        view = y[:, :3]
        view *= 2
        y[:, 0] = 5.0
        y[y > 4] = 0.0
        z = self.relu(y)
        scratch.add_(1)
        scratch[0] = 7.0
        return y, z, scratch


def test_in_place_changes_are_nodes_and_never_reach_the_example_inputs(agree):
    scratch = torch.randn(4, 6)
    kept = scratch.clone()
    capture_program(InPlace(), (*X, scratch))
    assert torch.equal(scratch, kept)
    agree(InPlace(), (*X, scratch), (*X2, torch.randn(7, 6)))


class ResizesInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x):
        y = self.first(x)
        z = y.unsqueeze_(0)
        z.squeeze_(0)
        y.mul_(2).t_()
        y.t_()
        return self.second(y)


def test_recorded_tensors_are_those_of_the_call(agree):
    from fxopt.tracing.examples import Inputs
    from fxopt.tracing.recording import record

    model = ResizesInPlace()
    recording = record(model, (Inputs(*X),))
    (call,) = recording.calls[model.first]
    with torch.no_grad():
        assert torch.equal(call.output, model.first(*X))
        assert torch.equal(recording.calls[model.second][0].args[0], model.first(*X) * 2)
    agree(model, X, X2)


class Random(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(x) + torch.rand_like(x)


def test_random_state_is_left_alone():
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(3), random.random()
    torch.manual_seed(3)
    random.seed(3)
    capture_program(Random(), X)
    given = torch.rand(3), random.random()
    assert torch.equal(given[0], expected[0])
    assert given[1] == expected[1]


class PythonRandom(nn.Module):
    def forward(self, x):
        return x * 2 if random.random() < 0.5 else x


class NumpyRandom(nn.Module):
    def forward(self, x):
        return x * np.random.rand()


@pytest.mark.parametrize("model", [PythonRandom(), NumpyRandom()])
def test_random_numbers_from_elsewhere_are_opaque(model):
    program = capture_program(model, X)
    assert "random numbers" in program.opaque[""].reason


class Appends(nn.Module):
    def __init__(self):
        super().__init__()
        self.history = []
        self.table = {"seen": [0]}

    def forward(self, x):
        self.history.append(x)
        self.table["seen"][0] += 1
        return x + 1


def test_changed_containers_are_opaque_and_put_back():
    model = Appends()
    program = capture_program(model, X)
    assert "changes self.history" in program.opaque[""].reason
    assert model.history == []
    assert model.table == {"seen": [0]}


class RaisesAfterChanges(Counts):
    def forward(self, x):
        self.flag = True
        super().forward(x)
        raise ValueError("no good")


def test_a_failed_attempt_leaves_no_trace():
    model = RaisesAfterChanges()
    attributes, state = dict(model.__dict__), {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    with pytest.raises(
        InputError, match=r"the model \(RaisesAfterChanges\) raised ValueError on .*: no good"
    ) as caught:
        capture_program(model, X)
    assert isinstance(caught.value.__cause__, ValueError)
    assert torch.equal(torch.rand(2), expected)
    assert model.__dict__ == attributes
    assert type(model) is RaisesAfterChanges
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_an_error_names_the_innermost_module():
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(5, 5)))
    with pytest.raises(InputError, match=r"module '1.0' \(Linear\) raised RuntimeError"):
        capture_program(model, X)


def test_parameters_changed_in_place_are_refused():
    class Clamps(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(0, 0.5)
            return x * self.weight

    with pytest.raises(InputError, match="parameter 'weight' in place"):
        capture_program(Clamps(), X)


def test_embedding_with_max_norm_is_put_back():
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=0.1))
    before = model[0].weight.detach().clone()
    capture_program(model, (torch.arange(5),))
    assert torch.equal(model[0].weight, before)


def test_models_that_need_gradients_to_run():
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 1))

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(self.net(x).sum(), x)[0]

    class Force(Energy):
        def forward(self, x):
            x = x.requires_grad_()
            return torch.autograd.grad(self.net(x).sum(), x)[0]

    for model in (Energy(), Force()):
        expected = model(X[0].clone())
        program = capture_program(model, X)
        assert set(program.opaque) == {""}
        assert torch.equal(program.model(X[0].clone()), expected)

"""Attributes that a forward sets are set by its graph too: at the same place, to the same, for whoever reads them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime.graphs import detach, misses_in
from fxopt.runtime.values import ModelNames
from fxopt.tracing.program import capture_program

X, X2 = torch.arange(1.0, 13.0).reshape(3, 4), torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    """Keeps a state from call to call, and starts anew where the batch has another size."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.state = None

    def forward(self, x):
        if self.state is None or self.state.shape[0] != x.shape[0]:
            self.state = torch.zeros(x.shape[0], 4)
        y = torch.tanh(self.linear(x) + self.state)
        self.state = y.detach() * 0.5
        return y + self.state


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return x * self.calls


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.last = y = self.linear(x)
        self.size = x.shape[0]
        return y * self.size + self.last


class Swaps(nn.Module):
    """Reads a tensor, sets another, and goes on with both."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.ones(4), torch.full((4,), 2.0)

    def forward(self, x):
        old = self.first
        self.first = self.second * 1
        self.second = old + 1
        return x * old + self.first - self.second


class Shrinks(nn.Module):
    """Settles on a setting at the first call, as window attention does."""

    def __init__(self):
        super().__init__()
        self.window, self.shift = 8, 3

    def forward(self, x):
        if min(x.shape) <= self.window:
            self.shift = 0
            self.window = min(x.shape)
        return x.roll(self.shift, 0) * self.window


class Moves(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        self.table = self.table.to(x.dtype)
        return x + self.table


class Structure(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = None

    def start(self, x):
        self.factor = 1
        self.length = x.shape[0]
        return x * self.factor

    def pool(self, x):
        self.factor *= 2
        return x * self.factor


class UsesMethods(nn.Module):
    def __init__(self):
        super().__init__()
        self.structure, self.linear = Structure(), nn.Linear(4, 4)

    def forward(self, x):
        y = self.structure.start(x)
        for _ in range(2):
            y = self.structure.pool(self.linear(y))
        return y + self.structure.length


class SetsUp(nn.Module):
    """Sets the state of a grandchild before it is called."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Recurrent())

    def forward(self, x, fresh=True):
        if fresh:
            self.inner[0].state = torch.ones(x.shape[0], 4)
        return self.inner(x)


class InNoGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.mean = nn.Linear(4, 4), torch.zeros(4)

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * y.mean(0)
        return y - self.mean


class DecidesLater(nn.Module):
    """Sets an attribute, and then decides by data: where that misses, it is set once and not twice."""

    def __init__(self):
        super().__init__()
        self.linear, self.total = nn.Linear(4, 4), torch.zeros(())

    def forward(self, x):
        self.total = self.total + x.sum()
        y = self.linear(x)
        return y * self.total if (x > 0).all() else y - self.total


class Parent(nn.Module):
    """Decides by data after a child has set its own attributes."""

    def __init__(self):
        super().__init__()
        self.child = Recurrent()

    def forward(self, x):
        y = self.child(x)
        return y if (x > 0).all() else -y


class Twice(nn.Module):
    """Calls a child twice, and sets what it reads in between."""

    def __init__(self):
        super().__init__()
        self.child = Recurrent()

    def forward(self, x):
        y = self.child(x)
        self.child.state = x * 0.1
        return self.child(y) + self.child(x)


class Flips(nn.Module):
    """Sets what functions whose names begin with an `i` make of a buffer, new tensors all."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("scale", torch.arange(4.0))
        self.register_buffer("order", torch.tensor([1, 2, 3, 0]))

    def forward(self, x):
        y = x * self.mask * self.scale
        self.mask = ~self.mask
        self.scale = torch.index_select(self.scale, 0, self.order)
        return y


class ChangesBack(nn.Module):
    """Sets a buffer to another tensor, and then to the first one, which it changed in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.ones(4))

    def forward(self, x):
        old = self.total
        self.total = x[0] * 2
        self.total = old.add_(1)
        return x * self.total


MODELS = (
    Recurrent, Last, Swaps, Shrinks, Moves, UsesMethods, SetsUp, InNoGrad, DecidesLater, Parent, Twice,
    Flips, ChangesBack,
)  # fmt: skip


def attributes(model: nn.Module) -> dict[str, object]:
    known = vars(nn.Module()).keys()
    held = [(name, m, vars(m)) for name, m in model.named_modules()]
    found = {
        f"{n}.{k}": v
        for n, _, own in held
        for k, v in own.items()
        if k not in known and "fxopt" not in k and "no_grad" not in k
    }
    return {**found, **{f"{n}.{k}": v for n, m, _ in held for k, v in m._buffers.items()}}


def assert_same_attributes(given: nn.Module, expected: nn.Module) -> None:
    left, right = attributes(given), attributes(expected)
    assert left.keys() == right.keys()
    for name, value in right.items():
        if isinstance(value, Tensor):
            assert torch.equal(left[name], value), name
            assert left[name].requires_grad == value.requires_grad
        else:
            assert type(left[name]) is type(value), name
            assert left[name] == value, name


def assert_alike(fast: nn.Module, model: nn.Module, calls: tuple[Tensor, ...] = (X, X, X2, -X, X2, X)) -> None:
    for training in (False, True):
        fast.train(training)
        model.train(training)
        for x in calls:
            assert torch.equal(fast(x), model(x))
            assert_same_attributes(fast, model)


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_is_left_behind_after_every_call(kind):
    model = kind()
    captured = copy.deepcopy(model)
    program = capture_program(captured, (X,))
    assert not program.opaque, program.coverage().text
    assert_same_attributes(captured, model)
    assert_alike(captured, model)


@pytest.mark.parametrize("kind", MODELS)
def test_once_handed_over_too(kind):
    model = kind()
    fast = capture_program(copy.deepcopy(model), (X,)).model
    detach(ModelNames(fast))
    assert_alike(fast, model)
    assert_alike(fast, model)


@pytest.mark.parametrize("kind", [Recurrent, Last, Swaps, Shrinks, Moves, UsesMethods, InNoGrad])
def test_the_usual_call_runs_the_graph(kind, misses):
    model = kind()
    program = capture_program(copy.deepcopy(model), (X,))
    for _ in range(3):
        assert torch.equal(program.model(X), model(X))
    assert misses(program) <= (1 if kind is Recurrent else 0)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_attributes_of_their_own(kind, copied):
    model = kind()
    captured = capture_program(copy.deepcopy(model), (X,)).model
    with torch.no_grad():  # torch copies no tensor with a history
        captured(X)
        model(X)
    first = attributes(captured)
    assert_alike(copied(captured), model)
    assert all(value is attributes(captured)[name] for name, value in first.items())


@pytest.mark.parametrize("kind", MODELS)
def test_optimized_models_are_equal_and_restored(kind):
    model = kind().eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = attributes(model)
    fast = fxopt.optimize(model, "inference", example_inputs=(X,), measure=False)
    assert attributes(model) == before, "the user's model is untouched"
    restored = fxopt.restore(fast)
    assert type(restored) is kind
    assert list(fast.state_dict()) == list(state)
    with torch.no_grad():
        for x in (X, X2, X):
            expected = model(x)
            assert torch.allclose(fast(x), expected)
            assert torch.allclose(restored(x), expected)


def test_setting_the_attribute_from_outside_is_seen(misses):
    model = Recurrent()
    captured = capture_program(copy.deepcopy(model), (X,)).model
    for state in (torch.full((3, 4), 3.0), None, torch.ones(2, 4)):
        captured.state = model.state = state
        assert torch.equal(captured(X), model(X))
        assert_same_attributes(captured, model)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.counter = Counter()

    def forward(self, x):
        y = self.counter(x)
        return y + self.counter.calls


class AssignsParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.weight = self.other
        return x * self.weight


class AssignsModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        self.now = self.one
        return self.now(x)


class AssignsProperty(nn.Module):
    def __init__(self):
        super().__init__()
        self.history = []

    @property
    def last(self):
        return self.history[-1]

    @last.setter
    def last(self, value):
        self.history.append(value)

    def forward(self, x):
        self.last = x * 2
        return x


class AssignsList(nn.Module):
    def forward(self, x):
        self.parts = [x, x + 1]
        return self.parts[0] + self.parts[1]


class AssignsTrainingFlag(nn.Module):
    def forward(self, x):
        self.training = False
        return x * 2


class Deletes(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = 1

    def forward(self, x):
        if hasattr(self, "value"):
            del self.value
        return x * 2


REFUSED = {
    Reads: "a child after a call that sets it",
    AssignsModule: "assigns self.now",
    AssignsProperty: "assigns self.last",
    AssignsList: "assigns self.parts",
    AssignsTrainingFlag: "assigns self.training",
    Deletes: "deletes self.value",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_graph_can_set_is_refused(kind):
    model = kind()
    program = capture_program(copy.deepcopy(model), (X,))
    assert REFUSED[kind] in program.opaque[""].reason
    for x in (X, X2, X):
        assert torch.equal(program.model(x), model(x))


def test_parameters_are_not_assigned():
    model = AssignsParameter()
    object.__setattr__(model, "other", nn.Parameter(torch.full((4,), 3.0)))
    program = capture_program(copy.deepcopy(model), (X,))
    assert "assigns self.weight" in program.opaque[""].reason


def test_a_counter_that_decides_nothing_misses_each_time():
    model = nn.Sequential(Counter())
    fast = capture_program(copy.deepcopy(model), (X,)).model
    detach(ModelNames(fast))
    for _ in range(10):
        assert torch.equal(fast(X), model(X))
    assert fast[0].calls == model[0].calls
    assert sum(miss.calls for miss in misses_in(fast.modules())) > 4


def test_gradients_through_what_was_set():
    model = Last()
    captured = capture_program(copy.deepcopy(model), (X,)).model
    for each in (model, captured):
        each(X)
        each.last.sum().backward()
    assert torch.equal(captured.linear.weight.grad, model.linear.weight.grad)


class Kept(nn.Module):
    """Keeps what it computed, with its history."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(4, 4), None

    def forward(self, x):
        y = self.linear(x) if self.last is None else self.linear(x) + 0 * self.last
        self.last = y
        return y


class Clears(nn.Module):
    """Clears what its child keeps, before each call."""

    def __init__(self):
        super().__init__()
        self.child = Kept()

    def forward(self, x):
        self.child.last = None
        return self.child(x) * 2


def trained(model, steps=3):
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("examples", [(X,), None])
def test_what_a_child_keeps_is_cleared_at_every_call(examples):
    model = Clears()
    program = capture_program(copy.deepcopy(model), examples)
    assert "" in program.graphs
    assert trained(program.model) == pytest.approx(trained(model))


def test_two_steps_of_training_are_checked(monkeypatch):
    """A graph that forgets to clear what the first step kept gives the same output, and leads the second back there."""
    monkeypatch.setattr("fxopt.tracing.trace.assignments.Assignments._may_be_another", lambda *_: False)
    model = Clears()
    program = capture_program(copy.deepcopy(model), (X,))
    assert trained(program.model) == pytest.approx(trained(model))

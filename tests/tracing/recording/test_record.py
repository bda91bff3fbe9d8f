"""Recording the calls of a model, and redirecting functions to do so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime.graphs import misses_in
from fxopt.testing import assert_equivalent
from fxopt.tracing.examples import Inputs
from fxopt.tracing.isolation import redirect
from fxopt.tracing.recording import record


class Counted(nn.Module):
    """Count the calls of a model with in-place operations."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.second = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        type(self).runs += 1
        y = self.relu(self.first(x))
        z = self.second(y)
        z += y
        return z


def test_examples_are_recorded_in_one_run_though_tensors_are_changed_in_place():
    Counted.runs = 0
    model = Counted()
    recording = record(model, (Inputs(torch.randn(2, 4)),), exact=False)
    assert Counted.runs == 1
    assert not recording.is_exact()
    assert record(model, (Inputs(torch.randn(2, 4)),)).is_exact()
    assert Counted.runs == 3  # without copies, and with them


def test_an_exact_recording_holds_what_was_given_before_it_was_changed():
    model, x = Counted(), torch.randn(2, 4)
    recording = record(model, (Inputs(x),))
    (call,) = recording.calls[model.relu]
    assert torch.equal(call.args[0], model.first(x))
    assert not torch.equal(call.args[0], call.output)


class Growing(nn.Module):
    """Append to a list that a child was given."""

    def __init__(self) -> None:
        super().__init__()
        self.join = Joined()

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        parts.append(self.join(parts))
        parts.append(self.join(parts))
        return torch.cat(parts, 1)


class Joined(nn.Module):
    """Add up a list."""

    def forward(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).sum(0)


def test_a_list_is_recorded_as_it_was_though_it_grows_later():
    model = Growing()
    for exact in (True, False):
        calls = record(model, (Inputs(torch.randn(2, 3)),), exact=exact).calls[model.join]
        assert [len(call.args[0]) for call in calls] == [1, 2]
    program = fxopt.capture(model, (torch.randn(2, 3),))
    assert not program.opaque
    assert_equivalent(program.model, model, (torch.randn(5, 3),))


class Shifted(nn.Module):
    """Move indices in place, so that what is recorded is out of range once it is moved again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 3))

    def forward(self, index: Tensor) -> Tensor:
        index.sub_(10)
        return self.table[index]


class Shifting(nn.Module):
    """Call a child that changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Shifted()

    def forward(self, index: Tensor) -> Tensor:
        return self.child(index + 10)


def test_a_model_that_only_exact_numbers_let_through_is_captured():
    index = torch.tensor([0, 3, 1])
    model = Shifting()
    program = fxopt.capture(model, (index,))
    assert not program.opaque
    assert torch.equal(program.model(index), model(index))


class Negating(nn.Module):
    """Decide by what it is given, then change its sign in place."""

    def __init__(self) -> None:
        super().__init__()
        self.tanh = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        y = self.tanh(x) if x.sum() > 0 else x * 3
        x.neg_()
        return y


class Deciding(nn.Module):
    """Call a child that decides by data that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Negating()

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x + 1)


def test_the_branch_that_is_captured_is_the_one_that_the_example_took():
    model, x = Deciding(), torch.ones(2, 3)
    captured = fxopt.capture(model, (x,)).model
    assert torch.equal(captured(x), model(x))
    assert not misses_in(captured.modules())
    assert torch.equal(captured(-3 * x), model(-3 * x))
    assert misses_in(captured.modules())


class Reshaped(nn.Module):
    """Give what a child gave another shape in place."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 4)
        self.head = Doubled()

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(x)
        return self.head(y.unsqueeze_(0)).squeeze_(0)


class Doubled(nn.Module):
    """Decide by the number of dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.dim() == 3 else x * 3


def test_shapes_are_those_of_the_call():
    model = Reshaped()
    recording = record(model, (Inputs(torch.randn(2, 3)),), exact=False)
    assert recording.calls[model.child][0].output.shape == (2, 4)
    assert recording.calls[model.head][0].args[0].shape == (1, 2, 4)
    assert recording.calls[model.head][0].output.shape == (1, 2, 4)
    program = fxopt.capture(model, (torch.randn(2, 3),))
    assert not program.opaque
    assert_equivalent(program.model, model, (torch.randn(5, 3),))


class Owned(nn.Module):
    """Return a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(3))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.weight.view(3, 1), self.scale


class Borrowing(nn.Module):
    """Write into a buffer that a child returned, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Owned()

    def forward(self, x: Tensor) -> Tensor:
        weight, scale = self.child()
        if self.training:
            scale.mul_(2)
        return x @ weight * scale


def test_tracing_writes_into_no_tensor_of_the_model():
    model = Borrowing().eval()
    recording = record(model, (Inputs(torch.randn(2, 3)),), exact=False)
    weight, scale = recording.calls[model.child][0].output
    weight.mul_(2)
    scale.mul_(2)
    assert torch.equal(model.child.weight, torch.ones(3)) and torch.equal(model.child.scale, torch.ones(3))
    captured = fxopt.capture(model, (torch.randn(2, 3),)).model
    for name, tensor in captured.state_dict().items():
        assert torch.equal(tensor, torch.ones(3)), name


def added(a: int, b: int = 1, *, c: int = 0) -> int:
    """Add three numbers."""
    return a + b + c


def test_a_redirected_function_is_itself_again_afterwards():
    seen: list[Any] = []

    def note(original: Any, *args: int, **kwargs: int) -> int:
        seen.append((args, kwargs))
        return -original(*args, **kwargs)

    def twice(original: Any, *args: int, **kwargs: int) -> int:
        return 2 * original(*args, **kwargs)

    end = redirect(added, note)
    assert added(1) == -2
    inner = redirect(added, twice)
    assert added(1, c=4) == -12
    inner()
    assert added(1, 2) == -3
    end()
    assert added(1, 2, c=3) == 6
    assert seen == [((1,), {}), ((1,), {"c": 4}), ((1, 2), {})]


def test_functions_with_free_variables_can_be_redirected():
    class Base:
        def name(self) -> str:
            return "base"

    class Derived(Base):
        def name(self) -> str:
            return f"derived {super().name()}"

    end = redirect(Derived.name, lambda original, self: f"seen {original(self)}")
    assert Derived().name() == "seen derived base"
    end()
    assert Derived().name() == "derived base"


def test_what_is_changed_inside_of_what_is_recorded_asks_for_no_second_run() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.relu = nn.Linear(2, 2), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            runs.append(len(x))
            return self.relu(self.linear(x)) + 0.0

    runs, model = list[int](), nn.Sequential(Counted())
    recording = record(model, [Inputs(torch.ones(3, 2))], [model])
    assert runs == [3] and list(recording.calls) == [model]
    assert torch.equal(recording.calls[model][0].args[0], torch.ones(3, 2))
    assert record(model, [Inputs(torch.ones(3, 2))]).calls.keys() == set(model.modules()) and runs == [3] * 3

"""`assert_equivalent` is fed wrong answers, and objects."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fxopt.errors import InputError, UsageError, VerificationError
from fxopt.passes.sites import Numerics
from fxopt.testing import NotEquivalentError, assert_equivalent
from fxopt.tracing.examples import Inputs


class Model(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.scale = scale

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        z = self.dropout(self.norm(self.linear(x))) * self.scale
        return z if y is None else z + y


def twin(model: Model, scale: float = 1.0) -> Model:
    other = Model(scale)
    other.load_state_dict(model.state_dict())
    return other


X, Y = torch.linspace(-1, 1, 20).reshape(5, 4).cos(), torch.zeros(5, 3)


@pytest.mark.parametrize(
    "inputs", [(X,), {"x": X, "y": Y}, Inputs(X, y=Y), [(X,), {"x": X[:3]}], [Inputs(X), Inputs(X, Y)]]
)
@pytest.mark.parametrize("training", [None, True, False])
def test_equal_models_pass_and_others_do_not(inputs: object, training: bool | None) -> None:
    model = Model()
    verdict = assert_equivalent(model, twin(model), inputs, training=training)
    assert (verdict.ok, verdict.checked_in) == (True, "float64")
    with pytest.raises(NotEquivalentError, match=r"output differs: 1\.0e-06 relative to its scale"):
        assert_equivalent(model, twin(model, 1 + 1e-6), inputs, training=training)


def test_the_error_is_what_test_runners_and_callers_expect() -> None:
    with pytest.raises(AssertionError):
        assert_equivalent(nn.Linear(2, 2), nn.Linear(2, 2), (torch.ones(1, 2),))
    with pytest.raises(VerificationError):
        assert_equivalent(nn.Linear(2, 2), nn.Linear(2, 2), (torch.ones(1, 2),))


def test_comparing_on_nothing_is_an_error() -> None:
    model = Model()
    for nothing in (None, []):
        with pytest.raises(UsageError):
            assert_equivalent(model, model, nothing)


def test_a_model_that_refuses_the_inputs_is_named() -> None:
    with pytest.raises(InputError, match="Model raised"):
        assert_equivalent(Model(), Model(), (torch.ones(2, 7),))


def test_gradients_can_be_left_out() -> None:
    before, after = nn.Linear(3, 3), nn.Linear(3, 3)
    after.load_state_dict(before.state_dict())
    after.weight.requires_grad_(False)
    with pytest.raises(NotEquivalentError, match="gradient of weight is lost"):
        assert_equivalent(before, after, (X[:, :3],))
    assert_equivalent(before, after, (X[:, :3],), gradients=False)


def test_renamed_tensors_need_a_map() -> None:
    before, after = nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 2))
    after[0].load_state_dict(before.state_dict())
    with pytest.raises(NotEquivalentError, match="weight is missing"):
        assert_equivalent(before, after, (X,))
    assert_equivalent(before, after, (X,), map_state=lambda state: {f"0.{name}": t for name, t in state.items()})


def test_promises_differ() -> None:
    before = nn.Linear(4, 4)
    after = copy.deepcopy(before)
    with torch.no_grad():
        after.weight.mul_(1.01)
    for numerics in (Numerics.EXACT, Numerics.REASSOCIATED):
        with pytest.raises(NotEquivalentError):
            assert_equivalent(before, after, (X,), numerics=numerics)
    assert_equivalent(before, after, (X,), numerics=Numerics.APPROXIMATE)
    with pytest.raises(NotEquivalentError):
        assert_equivalent(before, after, (X,), numerics=Numerics.APPROXIMATE, budget=1e-4)
    assert_equivalent(before, after, (X,), numerics=Numerics.SEMANTIC)


def test_models_and_the_random_state_are_left_alone() -> None:
    model = Model()
    other = twin(model)
    state = copy.deepcopy(model.state_dict())
    generator = torch.get_rng_state()
    assert_equivalent(model, other, (X,), training=False)
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training
    assert other.training
    for candidate in (model, other):
        assert all(torch.equal(tensor, state[name]) for name, tensor in candidate.state_dict().items())
        assert all(parameter.grad is None for parameter in candidate.parameters())

"""Units that shrink while a model is trained, and shares for pruning in several steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.errors import StateError, UsageError
from fxopt.transforms.prune import GroupSparsity, Prune, shares_in_steps

X = torch.randn(16, 3, 6, 6)
HALF = Prune(method="structured", scope="layer", amount=0.5)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)
    )


def sparsity(model: nn.Module, steps: int = 100, **options: Any) -> GroupSparsity:
    return GroupSparsity(model, HALF, fxopt.capture(model, X), steps, **options)


def train(model: nn.Module, sparse: GroupSparsity, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), torch.arange(16) % 4).backward()
        sparse.step()
        optimizer.step()


def test_the_units_that_go_shrink_and_the_rest_then_does_as_well() -> None:
    model = network()
    sparse = sparsity(model, strength=2.0)
    before = sparse.share_left()
    train(model, sparse, 200)
    assert sparse.share_left() < 0.05 < 0.3 < before
    kept = sparse.state_dict()["gone"]
    model.eval()
    small = fxopt.optimize(model, HALF, example_inputs=X)
    (first, _) = fxopt.plan(small).decisions
    assert first.site is not None
    assert sorted(set(range(8)) - set(first.site["data"]["units"]["0"][2])) == kept["0.weight"]["0"]
    torch.testing.assert_close(small(X), model(X), atol=0.2, rtol=0)


def test_the_strength_grows_and_the_gradient_is_that_of_the_penalty() -> None:
    model = network()
    sparse = sparsity(model, steps=4)
    seen: list[float] = []
    for _ in range(6):
        seen.append(sparse.strength)
        model.zero_grad()
        sparse.step()
    assert seen == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    gone = sparse.state_dict()["gone"]["0.weight"]["0"]
    expected = torch.zeros_like(model[0].weight)
    expected[gone] = model[0].weight[gone].detach()
    torch.testing.assert_close(model[0].weight.grad, expected)


def test_it_goes_on_from_a_checkpoint_with_the_units_of_then() -> None:
    model = network()
    sparse = sparsity(model)
    train(model, sparse, 3)
    state = copy.deepcopy(sparse.state_dict())
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.flip(0))  # others are the weakest now
    again = sparsity(model)
    assert again.state_dict()["gone"] != state["gone"]
    again.load_state_dict(state)
    assert again.state_dict() == state and again.strength == sparse.strength
    plain = nn.Sequential(nn.Linear(3, 8, bias=False), nn.ReLU(), nn.Linear(8, 2))
    other = GroupSparsity(plain, HALF, fxopt.capture(plain, torch.ones(2, 3)), 4)
    with pytest.raises(StateError, match=r"of another model: only one of them has units in '0\.bias'"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prune": Prune()}, "method=magnitude removes no units"),
        ({"steps": 0}, "steps=0, strength=1.0; give 1 step or more"),
        ({"strength": 0.0}, "strength=0.0; give"),
        ({"prune": Prune(method="structured", amount=0.0)}, "no unit of this model would go"),
    ],
)
def test_what_shrinks_nothing_is_refused(change: dict[str, Any], message: str) -> None:
    model = network()
    given: dict[str, Any] = {"prune": HALF, "program": fxopt.capture(model, X), "steps": 4, **change}
    with pytest.raises(UsageError, match=message):
        GroupSparsity(model, **given)


@pytest.mark.parametrize("schedule", ["linear", "cubic"])
@pytest.mark.parametrize("steps", [1, 3])
def test_shares_in_steps_add_up(schedule: Any, steps: int) -> None:
    shares = shares_in_steps(0.5, steps, schedule)
    left = 1.0
    for share in shares:
        left *= 1 - share
    assert len(shares) == steps and left == pytest.approx(0.5)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))
    for share in shares:
        pass_ = Prune(method="structured", scope="layer", amount=share)
        model = fxopt.optimize(model, pass_, example_inputs=torch.randn(2, 6))
    assert abs(model[0].out_features - 32) <= 1
    with pytest.raises(UsageError, match=r"amount=1\.5, steps=3; give a share"):
        shares_in_steps(1.5, 3)

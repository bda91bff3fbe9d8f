"""Optimizers that are given to `optimize` and `restore`: training goes on as if nothing had happened."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.small_models import Ensemble
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

import fxopt
from fxopt.errors import StateError, UsageError


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


def made() -> Ensemble:
    torch.manual_seed(0)
    return Ensemble().double()


def fused(model: nn.Module, **options: Any) -> Any:
    passes = "fuse_ensembles{lowering=bmm}"
    return fxopt.optimize(model, passes, example_inputs=(inputs(),), verify=False, measure=False, **options)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (model(inputs()) - 1).square().mean().backward()
        optimizer.step()


def groups_of(model: Ensemble) -> list[dict[str, Any]]:
    return [{"params": [*model.trunk.parameters()]}, {"params": [*model.heads.parameters()], "weight_decay": 0.1}]


def adam(model: Ensemble) -> Optimizer:
    return optim.AdamW(groups_of(model), lr=0.05, amsgrad=True)


KINDS: dict[str, Callable[[Ensemble], Optimizer]] = {
    "adamw": adam,
    "momentum": lambda m: optim.SGD(groups_of(m), lr=0.05, momentum=0.9),
    "by name": lambda m: optim.RMSprop(m.named_parameters(), lr=0.01),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_training_goes_on_there_and_back(kind: Callable[[Ensemble], Optimizer], inplace: bool):
    plain, model = made(), made()
    expected, optimizer = kind(plain), kind(model)
    schedulers = [StepLR(each, 2, 0.5) for each in (expected, optimizer)]

    def compare(now: nn.Module) -> None:
        for each, its_own in ((plain, expected), (now, optimizer)):
            train(each, its_own)
        for scheduler in schedulers:
            scheduler.step()
        torch.testing.assert_close(now(inputs()), plain(inputs()))

    compare(model)
    fast = fused(model, optimizer=optimizer, inplace=inplace)
    assert (fast is model) is inplace
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == set(map(id, fast.parameters()))
    compare(fast)
    restored = fxopt.restore(fast, optimizer=optimizer)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == set(map(id, restored.parameters()))
    compare(restored)
    assert optimizer.param_groups[0]["lr"] == expected.param_groups[0]["lr"]


@pytest.mark.parametrize("inplace", [False, True])
def test_a_model_that_was_optimized_before(inplace: bool):
    plain, model = made(), made()
    expected, optimizer = adam(plain), adam(model)
    model = fused(model, optimizer=optimizer)
    train(plain, expected)
    train(model, optimizer)
    options: dict[str, Any] = {"example_inputs": (inputs(),), "optimizer": optimizer, "inplace": inplace}
    model = fxopt.optimize(model, "eliminate_dead_code", verify=False, measure=False, **options)
    train(plain, expected)
    train(model, optimizer)
    torch.testing.assert_close(model(inputs()), plain(inputs()))


def test_parameters_of_other_modules_stay():
    model, other = made(), nn.Linear(2, 2)
    optimizer = optim.Adam([*other.parameters(), *model.parameters()])
    fused(model, optimizer=optimizer)
    assert all(one is two for one, two in zip(optimizer.param_groups[0]["params"], other.parameters(), strict=False))
    assert len(optimizer.param_groups[0]["params"]) == 2 + 2 + 4


def state_of(optimizer: Optimizer) -> Any:
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("inplace", [False, True])
def test_what_cannot_move_changes_nothing(inplace: bool):
    model = made()
    names = list(model.state_dict())
    optimizer = optim.Adam([{"params": head.parameters(), "lr": 0.1 * (i + 1)} for i, head in enumerate(model.heads)])
    train(model, optimizer)
    held = [p for g in optimizer.param_groups for p in g["params"]]
    before = state_of(optimizer)
    with pytest.raises(StateError, match="in different parameter groups"):
        fused(model, optimizer=optimizer, inplace=inplace)
    assert list(model.state_dict()) == names
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == list(map(id, held))
    torch.testing.assert_close(state_of(optimizer), before)


REFUSED: dict[str, tuple[Callable[[Ensemble], Any], type[Exception], str]] = {
    "no optimizer": (lambda m: m, UsageError, "optimizer= takes a torch.optim.Optimizer"),
    "of another model": (lambda m: optim.Adam(made().parameters()), StateError, "holds none of the model's"),
    "whole tensors": (lambda m: optim.LBFGS(m.parameters()), StateError, "LBFGS is not known to update each element"),
}


@pytest.mark.parametrize(("make", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_at_once(make: Callable[[Ensemble], Any], error: type[Exception], message: str):
    model = made()
    with pytest.raises(error, match=message):
        fxopt.optimize(model, "no_such_pass", optimizer=make(model))
    fast = fused(model)
    with pytest.raises(error, match=message):
        fxopt.restore(fast, optimizer=make(fast))


def test_going_back_is_said_where_it_is_tried():
    fast = fused(made())
    optimizer = optim.Adam(fast.parameters())
    with pytest.raises(StateError, match=r"fxopt\.restore\(fast, optimizer=optimizer\)"):
        fxopt.translate_optimizer(optimizer, fxopt.restore(fast))


def test_an_optimizer_that_is_left_behind_is_told():
    model = made()
    optimizer = adam(model)
    with pytest.warns(
        UserWarning, match=r"this AdamW holds 16 parameters that were merged.*translate_optimizer"
    ) as noted:
        fused(model, inplace=True)
    assert noted[0].filename == __file__
    fxopt.translate_optimizer(optimizer, model)
    before = model(inputs())
    train(model, optimizer)
    assert not torch.equal(model(inputs()), before)


@pytest.mark.filterwarnings("error:.*merged into others")
def test_no_warning_without_one():
    fused(made(), inplace=True)
    model = made()
    fused(model, inplace=True, optimizer=adam(model))


@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_that_wait_for_a_step_go_along(inplace: bool):
    """The first half of a step is taken before `optimize`, the second one after it; and the same around `restore`."""
    plain, model = made(), made()
    expected, optimizer = adam(plain), adam(model)

    def half(now: nn.Module) -> None:
        for each in (plain, now):
            (each(inputs()) - 1).square().mean().backward()

    def step(now: nn.Module) -> None:
        for its_own in (expected, optimizer):
            its_own.step()
            its_own.zero_grad()
        torch.testing.assert_close(now.state_dict(), plain.state_dict())

    half(model)
    fast = fused(model, optimizer=optimizer, inplace=inplace)
    half(fast)
    step(fast)
    half(fast)
    again = fxopt.restore(fast, optimizer=optimizer)
    step(again)
    half(fast)  # this is another model again
    assert all(parameter.grad is None for parameter in again.parameters())


def test_the_original_keeps_its_gradients():
    model = made()
    optimizer = adam(model)
    model(inputs()).sum().backward()
    before = [parameter.grad for parameter in model.parameters()]
    copies = copy.deepcopy(before)
    fast = fused(model, optimizer=optimizer)
    fast(inputs()).sum().backward()
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), before, strict=True))
    torch.testing.assert_close(before, copies)


def test_a_member_without_a_gradient_has_one_of_zeros():
    model = made()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    sum(head(inputs()).sum() for head in model.heads[1:]).backward()
    fast = fused(model, optimizer=optimizer)
    assert fast.trunk.weight.grad is None
    assert not fast.heads[0][0].weight.grad.any()
    for mine, its_own in zip(fast.heads[1].parameters(), model.heads[1].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its_own.grad)


def test_a_parameter_that_has_a_gradient_keeps_it():
    model = made()
    optimizer = adam(model)
    model(inputs()).sum().backward()
    fast = fused(model)
    fast(inputs()).square().sum().backward()
    before = copy.deepcopy([parameter.grad for parameter in fast.parameters()])
    fxopt.translate_optimizer(optimizer, fast)
    torch.testing.assert_close([parameter.grad for parameter in fast.parameters()], before)

"""channels_last beside optimizers: parameters, gradients and moments lie as they did, so any kernel trains the same."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim

import fxopt

IMAGES = torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(0))
Step = Callable[[nn.Module, optim.Optimizer, Tensor], Tensor]
Optimizers = Callable[[nn.Module], optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "adamw, fused": lambda model: optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "adamw, foreach": lambda model: optim.AdamW(model.parameters(), lr=1e-2, foreach=True),
    "sgd, fused": lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adagrad, fused": lambda model: optim.Adagrad(model.parameters(), lr=1e-2, fused=True),
    "sgd": lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}
"""Torch's fused kernels for CPU go through memory in its order, whatever the strides are."""


def network() -> nn.Module:
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU())
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(6 * 36, 5))


def laid(model: nn.Module, optimizer: optim.Optimizer | None = None) -> nn.Module:
    fast = fxopt.optimize(model, "training", example_inputs=IMAGES, optimizer=optimizer, measure=False)
    applied = [each.pass_name for each in fxopt.plan(fast).decisions if each.status == "applied"]
    assert "channels_last" in applied
    return fast


def given(model: nn.Module, optimizer: optim.Optimizer, _: Optimizers) -> tuple[nn.Module, optim.Optimizer]:
    return laid(model, optimizer), optimizer


def loaded(model: nn.Module, optimizer: optim.Optimizer, make: Optimizers) -> tuple[nn.Module, optim.Optimizer]:
    state = copy.deepcopy(optimizer.state_dict())
    fast = laid(model)
    another = make(fast)
    another.load_state_dict(state)
    return fast, another


def translated(model: nn.Module, optimizer: optim.Optimizer, _: Optimizers) -> tuple[nn.Module, optim.Optimizer]:
    fast = laid(model)
    return fast, fxopt.translate_optimizer(optimizer, fast)


def restored(model: nn.Module, optimizer: optim.Optimizer, make: Optimizers) -> tuple[nn.Module, optim.Optimizer]:
    fast = laid(model)
    another = make(fast)
    another.load_state_dict(optimizer.state_dict())
    fast(IMAGES).square().mean().backward()
    return fxopt.restore(fast, optimizer=another), another


@pytest.mark.parametrize("way", [given, loaded, translated, restored])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_from_before_train_the_same_weights(name: str, way: Callable[..., object], step: Step) -> None:
    make = OPTIMIZERS[name]
    plain, model = network(), network()
    expected, before = make(plain), make(model)
    for _ in range(3):
        step(plain, expected, IMAGES)
        step(model, before, IMAGES)
    fast, optimizer = way(model, before, make)  # type: ignore[misc]
    for _ in range(3):
        torch.testing.assert_close(step(fast, optimizer, IMAGES), step(plain, expected, IMAGES), rtol=1e-5, atol=1e-5)
    for one, other in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_that_goes_on_behind_restore(name: str, step: Step) -> None:
    plain, model = network(), network()
    expected, optimizer = OPTIMIZERS[name](plain), OPTIMIZERS[name](model)
    trained = laid(model, optimizer)
    for number in range(6):
        if number == 3:
            trained = fxopt.restore(trained, optimizer=optimizer)
        step(plain, expected, IMAGES)
        step(trained, optimizer, IMAGES)
    for one, other in zip(trained.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
def test_parameters_gradients_and_moments_lie_as_parameters_did() -> None:
    """Of one backward, of two that add up, of a graph of gradients, and under autocast."""
    model = network()
    fast, strides = laid(model), [each.stride() for each in model.parameters()]
    optimizer = optim.AdamW(fast.parameters(), fused=True)
    for options in ({}, {"create_graph": True}):
        optimizer.zero_grad()
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=not options):
                loss = fast(IMAGES).float().square().mean()
            loss.backward(**options)
            gradients = [each.grad for each in fast.parameters()]
            assert [each.stride() for each in gradients if each is not None] == strides
        optimizer.step()
    optimizer.zero_grad()
    assert [each.stride() for each in fast.parameters()] == strides
    assert [optimizer.state[each]["exp_avg"].stride() for each in fast.parameters()] == strides

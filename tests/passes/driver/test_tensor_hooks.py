"""Hooks on parameters act on the result of optimize and of restore, or a warning names them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt


class Heads(nn.Module):
    """Members that are fused, and a layer that is left as it is; `tied` is its weight once more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))
        self.body = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.body.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.tied(torch.relu(self.body(x)))
        return torch.stack([head(y) for head in self.heads])


def optimized(model: nn.Module, **options: Any) -> nn.Module:
    passes = "fuse_ensembles{lowering=bmm}"
    return fxopt.optimize(model, passes, example_inputs=torch.randn(5, 4), measure=False, **options)


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(torch.linspace(-1, 1, 20).view(5, 4)).square().sum().backward()
    return [linear.weight.grad.clone() for linear in (model.heads[0], model.heads[2], model.body)]


@pytest.mark.parametrize("inplace", [False, True])
def test_hooks_act_on_the_result_once_on_each_tensor(inplace: bool) -> None:
    model = Heads()
    plain = gradients(model)
    seen = list[tuple[int, ...]]()
    model.heads[2].weight.register_hook(lambda gradient: gradient * 10)
    model.body.weight.register_hook(lambda gradient: gradient * 3)
    model.tied.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.shape))
    model.heads[0].bias.register_post_accumulate_grad_hook(lambda bias: seen.append(bias.shape))
    fast = optimized(model, inplace=inplace)
    assert [decision.status for decision in fxopt.plan(fast).decisions] == ["applied"] and not seen
    for each in (fast, fxopt.restore(fast), optimized(fast)):
        seen.clear()
        torch.testing.assert_close(gradients(each), [plain[0], 10 * plain[1], 3 * plain[2]])
        assert sorted(seen) == [(3,), (4, 4)]


def test_hooks_of_a_live_view_go_back_with_restore() -> None:
    model = Heads()
    plain, fast = gradients(model), optimized(model)
    fast.heads[2].weight.register_hook(lambda gradient: gradient * 10)
    for each in (fxopt.restore(fast), optimized(fast)):
        torch.testing.assert_close(gradients(each), [plain[0], 10 * plain[1], plain[2]])


def doubled(gradient: Tensor) -> Tensor:
    return 2 * gradient


LOST: dict[str, Callable[[nn.Module], nn.Module]] = {
    "pruned": lambda m: fxopt.optimize(
        m, "prune{method=structured,amount=0.5}", example_inputs=torch.randn(5, 4), measure=False
    ),
    "quantized": lambda m: fxopt.optimize(
        m.eval(), "quantize{aim=size}", example_inputs=torch.randn(5, 4), measure=False
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_hooks_that_nothing_can_take_are_named(case: str) -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    model[0].weight.register_hook(doubled)
    with pytest.warns(UserWarning, match=r"hooks on the gradient of '0\.weight'"):
        fast = LOST[case](model)
    assert "'0.weight'" in str(fxopt.report(fast))


def test_nothing_is_said_without_hooks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = optimized(Heads())
    assert "hooks" not in str(fxopt.report(fast))

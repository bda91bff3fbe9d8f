"""Modules with masks: the gradients that users train with are those that verification sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt


@pytest.mark.parametrize(
    "wrong",
    [lambda gone, g: g, lambda gone, g: g * 0, lambda gone, g: g.masked_fill(gone, 0) * 1.001],
    ids=["all", "none", "scaled"],
)
def test_gradients_that_are_masked_wrongly_are_found(wrong: Callable[[Tensor, Tensor], Tensor], monkeypatch: Any):
    monkeypatch.setattr("fxopt.layers.masked.module._without", wrong)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    fast = fxopt.optimize(model, "prune{scope=layer}", example_inputs=torch.randn(8, 16))
    reasons = [decision.reason for decision in fxopt.plan(fast).decisions]
    assert [reason.split(" differs")[0] for reason in reasons] == ["gradient of 0.weight", "gradient of 2.weight"]


def test_parameters_with_masks_can_be_swapped():
    model, x = nn.Sequential(nn.Linear(16, 8)), torch.randn(8, 16)
    fast = fxopt.optimize(model, "prune{scope=layer}", example_inputs=x, measure=False, verify=False)
    fast(x)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        fast.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert fast(x.double()).dtype is torch.float64 and (fast[0].weight == 0).any()


def test_replicas_compute_with_masked_copies():
    x = torch.randn(8, 16)
    fast = fxopt.optimize(nn.Sequential(nn.Linear(16, 8)), "prune{scope=layer}", example_inputs=x, measure=False)
    replica: Any = fast[0]._replicate_for_data_parallel()
    copied = torch.ones_like(fast[0].weight).requires_grad_()
    replica.weight, replica.bias = copied, fast[0].bias
    replica(x).sum().backward()
    gone = fast[0].weight == 0
    expected = x.sum(0).expand(8, 16).masked_fill(gone, 0)
    torch.testing.assert_close(copied.grad, expected)
    torch.testing.assert_close(replica.weight, torch.ones(8, 16).masked_fill(gone, 0))

"""Modules are verified and timed as they are called: under the autocast of the forward around them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxopt


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return torch.sin(x) + torch.sin(x)


class Model(nn.Module):
    """Autocast is switched on around children, so that the second one is given bfloat16, with float32 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), Child()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.second(self.first(x))


def test_a_module_is_compared_under_the_autocast_that_it_runs_in() -> None:
    model, x = Model(), torch.randn(4, 8)
    for measure in (False, True):
        fast = fxopt.optimize(model, "eliminate_common_subexpressions", example_inputs=x, measure=measure)
        (decision,) = fxopt.plan(fast).decisions
        assert decision.status in ("applied", "undone") and decision.label.startswith("second")
        assert decision.figures["checked"] == "float64"
        assert fast(x).dtype is torch.bfloat16
        torch.testing.assert_close(fast(x), model(x))

"""Example inputs that hold calls of parts of a model, as `generate` makes them: passes run the model on the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.errors import UsageError
from fxopt.testing import assert_equivalent


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(8, 2)
        self.unused = nn.Linear(8, 2)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.head(self.encoder(x * scale))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("passes", ["checkpoint{budget=0.5}", "ddp", "fsdp", "pipeline{stages=1}"])
def test_passes_run_the_model_on_calls_of_it(passes: str) -> None:
    model, x, scale = Model().train(), torch.randn(4, 8), torch.ones(8)
    calls = [fxopt.Inputs.of_part("encoder", torch.randn(3, 8)), fxopt.Inputs(x, scale)]
    fast = fxopt.optimize(model, passes, example_inputs=calls, measure=passes.startswith("checkpoint"))
    assert "applied" in {decision.status for decision in fxopt.plan(fast).decisions}
    if passes == "ddp":
        assert [d.key for d in fxopt.plan(fast).decisions if d.status == "refused"] == ["unused"]
    given = fast.eval()(x, scale)
    assert torch.allclose(given, model.eval()(x, scale))


def test_modules_are_compared_on_calls_of_them() -> None:
    with pytest.raises(UsageError, match="example call 0 is one of 'encoder'; give calls of the model itself"):
        assert_equivalent(Model(), Model(), fxopt.Inputs.of_part("encoder", torch.randn(3, 8)))

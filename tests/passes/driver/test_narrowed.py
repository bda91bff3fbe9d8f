"""A clean-up that is checked in evaluation alone, to save time, leaves a model that can be trained."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.passes.driver import groups

X = torch.randn(4, 8)


class Wasteful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x).exp()
        return self.dropout(self.layer(x))


def test_a_model_that_was_cleaned_up_for_evaluation_can_be_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_STEPS", 1e12)
    model = Wasteful().eval()
    fast = fxopt.optimize(model, "eliminate_dead_code", example_inputs=X, measure=False)
    assert [each.status for each in fxopt.plan(fast).decisions] == ["applied"]
    assert "exp" not in str(fxopt.graphs(fast)[""])
    torch.testing.assert_close(fast(X), model(X))
    results = []
    for each in (fast.train(), model.train()):
        torch.manual_seed(0)
        results.append(each(X))
        results[-1].sum().backward()
    torch.testing.assert_close(*results)
    torch.testing.assert_close(fast.layer.weight.grad, model.layer.weight.grad)
    torch.testing.assert_close(fast.eval()(X), model.eval()(X))

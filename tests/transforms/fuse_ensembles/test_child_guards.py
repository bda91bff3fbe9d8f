"""Conditions of children become conditions of the module that opens them, whatever texts they compare with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.tracing.guards import Guard
from fxopt.transforms.fuse_ensembles.inlining.mode_guards import child_guard

KIND = "self"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("self.training", "self._modules['a'].training"),
        ("not self.training", "not self._modules['a'].training"),
        ("x == 'self'", "x == 'self'"),
        (
            "self.kind == 'my self' and self.n == 2",
            "self._modules['a'].kind == 'my self' and self._modules['a'].n == 2",
        ),
        ("'é self' == fxopt_cells(self)['0:é']", "'é self' == fxopt_cells(self._modules['a'])['0:é']"),
        ("type(self).myself == 1", "type(self._modules['a']).myself == 1"),
    ],
)
def test_only_the_module_is_replaced(expression: str, expected: str) -> None:
    assert child_guard(Guard(expression, "why"), "a") == Guard(expected, "why")


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x * 2 if KIND == "self" else x


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


def test_members_that_read_such_a_text_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Heads().eval(), torch.randn(3, 4)
    fast = fxopt.optimize(model, "fuse_ensembles{lowering=bmm}", example_inputs=(x,), measure=False)
    assert [decision.status for decision in fxopt.plan(fast).decisions] == ["applied"]
    torch.testing.assert_close(fast(x), model(x))
    monkeypatch.setitem(globals(), "KIND", "other")
    torch.testing.assert_close(fast(x), model(x))

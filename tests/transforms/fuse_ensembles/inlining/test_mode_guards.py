"""Conditions of children become conditions of the module that opens them, whatever texts they compare with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime.guards import (
    SELF,
    Argument,
    Attribute,
    Equals,
    Guard,
    Is,
    IsNot,
    Source,
    Truth,
    item_of,
    key_of,
    module_at,
    type_of,
)
from fxopt.tracing.reads import guards_on
from fxopt.transforms.fuse_ensembles.inlining.inliner import child_guard, is_passed_on

KIND = "self"


def _guards(module: Source) -> list[Guard]:
    """Return guards in which a module occurs, and a text that says its name."""
    return [
        Guard(Attribute(module, "training"), Truth(False)),
        Guard(Argument("x"), Equals(key_of("self"))),
        Guard(item_of(module, "self"), Is(Attribute(module, "self"))),
        Guard(Attribute(type_of(module), "myself"), IsNot(module)),
    ]


def test_only_the_module_is_replaced() -> None:
    assert [child_guard(guard, "a") for guard in _guards(SELF)] == _guards(module_at(["a"]))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 2.0, [2], (1, True), None, "text"])
def test_conditions_on_classes_are_passed_on(value: object) -> None:
    guards = guards_on(Attribute(type_of(SELF), "amount"), value, "amount")
    assert guards
    for guard in guards:
        assert is_passed_on(guard) and is_passed_on(child_guard(guard, "child.inner"))


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

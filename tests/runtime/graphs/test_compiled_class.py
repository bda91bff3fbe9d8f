"""When the text of a graph is compiled: where a module is called, and at the latest where a run hands it over."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime.graphs import Captured, compile_postponed, compiled_class, own, postponing, recompile

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what is compiled from now on."""
    made: list[Any] = []
    function = compiled_class._function

    def noted(*given: Any) -> Any:
        made.append(function(*given))
        return made[-1]

    monkeypatch.setattr(compiled_class, "_function", noted)
    return made


def edited(method: str) -> nn.Module:
    """Return a block whose graph calls another method than its forward; its class has not changed yet."""
    model = fxopt.capture(Block().eval(), X).model
    (node,) = (each for each in own(model).specializations[0].graph.nodes if each.target == "relu")
    node.target = method
    return model


def test_a_forward_is_compiled_where_it_is_called(compiled: list[Any]) -> None:
    model = edited("tanh")
    compiled.clear()
    with postponing():
        recompile(model)
        assert not compiled
        for _ in range(2):
            torch.testing.assert_close(model(X), X + model.linear(X).tanh())
    assert len(compiled) == 1 and vars(type(model))["forward"] is compiled[0]


def test_what_a_run_hands_over_has_functions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), Block()) for _ in range(3))
    ).eval()
    x = torch.randn(2, 4, 8)
    fast = fxopt.optimize(model, "fold_batchnorm", example_inputs=x, verify=False, measure=False)
    classes = {type(module) for module in fast.modules() if isinstance(module, Captured)}
    assert classes and all(inspect.isfunction(inspect.getattr_static(cls, "forward")) for cls in classes)


def test_a_class_that_another_run_has_left_open_is_compiled() -> None:
    model = edited("sigmoid")
    with postponing():
        recompile(model)
        assert not inspect.isfunction(vars(type(model))["forward"])
    recompile(model)
    assert inspect.isfunction(vars(type(model))["forward"])
    compile_postponed([model])

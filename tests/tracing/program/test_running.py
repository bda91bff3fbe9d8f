"""Graphs are run node by node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxopt
from fxopt.runtime.graphs import required_capture
from fxopt.tracing.program import GraphRunner, function_of_node

X = torch.randn(3, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x) @ self.layer.weight).neg()


def captured() -> tuple[nn.Module, fx.Graph]:
    model = fxopt.capture(Model(), (X,)).model
    return model, required_capture(model).specializations[0].graph


def test_a_runner_gives_what_the_model_gives_without_torch_s_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def shows_progress(*_: Any, **__: Any) -> Any:
        raise AssertionError("this starts a thread that stays")

    monkeypatch.setattr(fx.Interpreter, "run", shows_progress)
    model, graph = captured()
    runner = GraphRunner(model, graph)
    torch.testing.assert_close(runner.run(X), Model.forward(model, X))
    assert [node.op for node in runner.env] == ["call_method", "output"]  # what is read no more is let go


def test_a_node_has_a_function_that_reads_tensors_anew() -> None:
    model, graph = captured()
    (weight,) = graph.find_nodes(op="get_attr")
    read = function_of_node(weight, model)
    model.layer.weight = nn.Parameter(torch.ones(4, 4))
    assert read() is model.layer.weight
    (negative,) = graph.find_nodes(op="call_method", target="neg")
    assert torch.equal(function_of_node(negative, model)(X), -X)


class Outer(nn.Module):
    """Calls a module with a list of tensors, as a DenseNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Joining()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner([x, x + 1])


class Joining(nn.Module):
    def forward(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, 1).relu()


def test_a_runner_gives_plain_lists_so_that_the_graphs_of_children_hold() -> None:
    model = fxopt.capture(Outer(), (X,)).model
    graph = required_capture(model).specializations[0].graph
    given: list[type] = []
    model.inner.register_forward_pre_hook(lambda _, args: given.append(type(args[0])))
    torch.testing.assert_close(GraphRunner(model, graph).run(X), Outer()(X))
    assert given == [list]

"""Registered operators in ensembles: computed for all members at once, as their rows say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx, nn

import fxopt
from fxopt.operators import OpInfo, register_operator
from fxopt.transforms.fuse_ensembles import BatchingRule


@torch.library.custom_op("fxopt_ensembles::swish", mutates_args=())
def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@torch.library.custom_op("fxopt_ensembles::rows", mutates_args=())
def rows(x: Tensor) -> Tensor:
    return x.sum(0)


@swish.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@rows.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1:])


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


class Swishing(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.tanh(swish(head(x))) for head in self.heads])


class Summing(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.tanh(rows(head(x))) for head in self.heads])


def fused(kind: type[Heads]) -> tuple[fx.Graph, list[str]]:
    model, x = kind().requires_grad_(False).eval(), torch.randn(2, 4)
    fast = fxopt.optimize(model, "fuse_ensembles{lowering=bmm}", example_inputs=(x,), measure=False)
    torch.testing.assert_close(fast(x), model(x))
    return fxopt.graphs(fast)[""], [decision.reason for decision in fxopt.plan(fast).decisions]


def calls(graph: fx.Graph, name: str) -> int:
    return sum(name in str(node.target) for node in graph.nodes)


@pytest.fixture
def elementwise() -> Iterator[None]:
    registration = register_operator(OpInfo("fxopt_ensembles::swish", elementwise=True))
    yield
    registration.remove()


def test_an_operator_that_nobody_described_is_called_for_each_member() -> None:
    graph, reasons = fused(Swishing)
    assert calls(graph, "swish") == 3, reasons


@pytest.mark.usefixtures("elementwise")
def test_an_elementwise_operator_is_called_once() -> None:
    graph, reasons = fused(Swishing)
    assert calls(graph, "swish") == 1 and calls(graph, "tanh") == 1, reasons


def test_a_batching_rule_is_asked() -> None:
    def write(pack: object, values: list[fx.Node], graph: fx.Graph) -> fx.Node:
        return graph.call_method("sum", (values[0], 1))

    registration = register_operator(OpInfo("fxopt_ensembles::rows", vectorizable=True, notes=(BatchingRule(write),)))
    try:
        graph, reasons = fused(Summing)
    finally:
        registration.remove()
    assert (calls(graph, "rows"), calls(graph, "sum"), calls(graph, "tanh")) == (0, 1, 1), reasons

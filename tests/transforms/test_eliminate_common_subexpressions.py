"""eliminate_common_subexpressions: computes equal things once, where they are equal."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxopt
from fxopt.passes.pipeline import parse
from fxopt.testing import assert_equivalent
from fxopt.transforms.eliminate_common_subexpressions import EliminateCommonSubexpressions


class Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) + torch.relu(self.layer(x)).sum(-1, keepdim=True)


class Distinct(nn.Module):
    """Alike, but not equal: 1, 1.0 and True, another dimension, another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        i = x.long()
        return (i + 1) + (i + 1.0) + x.sum(0) + x.sum(1) + self.a(x) + self.b(x)


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(x)
        b = torch.relu(x)
        a.add_(1)
        return a * b


class TwoOutputs(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x), torch.relu(x)


class ReturnsViews(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        inner = (x * 2).sum()
        return torch.sin(x) + inner, (x * 2).view(-1), (x * 2)[0]


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.rand_like(x) - torch.rand_like(x)


def merged(model: nn.Module, x: Tensor) -> nn.Module:
    return fxopt.optimize(model, "eliminate_common_subexpressions", example_inputs=(x,))


def count(model: nn.Module) -> int:
    return sum(node.op.startswith("call") for node in fxopt.graphs(model)[""].nodes)


def test_the_graph_before_and_after() -> None:
    model = Repeats()
    fast = merged(model, torch.randn(2, 4))
    assert [n.name for n in fxopt.graphs(fast)[""].nodes] == ["x", "layer", "relu", "sum_1", "add", "output"]
    assert_equivalent(model, fast, (torch.randn(3, 4),))


def test_equal_looking_values_of_other_types_are_kept_apart() -> None:
    model, x = Distinct(), torch.randn(4, 4)
    before = fxopt.optimize(model, [], example_inputs=(x,))
    assert count(merged(model, x)) == count(before)


def test_refuses_graphs_that_write() -> None:
    model, x = Writes(), torch.randn(4)
    fast = merged(model, x)
    (reason,) = [d.reason for d in fxopt.plan(fast).decisions]
    assert re.fullmatch(r"'add_' at \w+\.py:\d+ may write in place, so equal expressions may differ", reason)
    torch.testing.assert_close(fast(x), model(x))


class RepeatsSizes(nn.Module):
    """Repeat reads of sizes and, where it is to, a result of them."""

    def __init__(self, *, computes: bool) -> None:
        super().__init__()
        self.computes = computes

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[0], x.shape[1]
        first = x.view(x.shape[0], x.shape[1], 1)
        return first + (x.view(rows, columns, 1).sin() if self.computes else x.sum())


@pytest.mark.parametrize("computes", [False, True])
def test_sizes_alone_are_not_worth_a_rewrite(computes: bool) -> None:
    model, x = RepeatsSizes(computes=computes), torch.randn(3, 4)
    fast = merged(model, x)
    assert [decision.status for decision in fxopt.plan(fast).decisions] == ["applied"] * computes
    assert_equivalent(model, fast, (torch.randn(5, 2),))


def test_two_outputs_stay_two_tensors() -> None:
    x = torch.randn(4)
    one, other = merged(TwoOutputs(), x)(x)
    one.add_(1)
    assert not torch.equal(one, other)


def test_outputs_stay_apart_where_views_of_values_are_returned() -> None:
    model, x = ReturnsViews(), torch.randn(2, 4)
    fast = merged(model, x)
    for changed in range(3):
        expected, found = model(x), fast(x)
        expected[changed].fill_(9.0)
        found[changed].fill_(9.0)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_random_draws_stay_apart() -> None:
    x = torch.randn(16)
    assert merged(Random(), x)(x).abs().sum() > 0


def test_draws_stay_apart_though_evaluation_makes_none() -> None:
    class TwoMasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(x) - self.dropout(x)

    fast = fxopt.optimize(
        TwoMasks().eval(), "eliminate_common_subexpressions", example_inputs=(torch.ones(64),), verify=False
    )
    assert fast.train()(torch.ones(64)).abs().sum() > 0


def test_twice_is_once() -> None:
    x = torch.randn(2, 4)
    fast = merged(Repeats(), x)
    assert count(merged(fast, x)) == count(fast) == 4


@given(st.just(EliminateCommonSubexpressions()))
def test_text_round_trip(pass_: EliminateCommonSubexpressions) -> None:
    assert parse(str(pass_)) == (pass_,)

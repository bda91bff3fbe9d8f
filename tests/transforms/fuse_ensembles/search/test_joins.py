"""Sums over members, whatever the members end in, and sums of several packs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.testing import assert_equivalent

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """A member that ends in an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class TwoBranches(nn.Module):
    """A member that adds two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


class Sum(nn.Module):
    """The sum of its members."""

    def __init__(self, member: type[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(member() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return sum(member(x) for member in self.members)


class Gaussian(nn.Module):
    """A mean and the logarithm of a variance."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.log_variance = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).relu()
        return self.mean(h), self.log_variance(h)


class Mixture(nn.Module):
    """The mean and variance of an ensemble (Lakshminarayanan et al., 2017), written with `sum`."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(Gaussian() for _ in range(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        given = [member(x) for member in self.members]
        mean = sum(mu for mu, _ in given) / len(given)
        return mean, sum(log.exp() + mu**2 for mu, log in given) / len(given) - mean**2


class MixtureInLoop(Mixture):
    """The same, added up in a loop."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, square = 0, 0
        for member in self.members:
            mu, log = member(x)
            mean, square = mean + mu, square + log.exp() + mu.pow(2)
        return mean / 5, square / 5 - (mean / 5) ** 2


class Positions(nn.Module):
    """Tables of which two are read twice, added to others (as LayoutLM does)."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y, self.h, self.w = (nn.Embedding(10, 4) for _ in range(4))

    def forward(self, box: Tensor) -> Tensor:
        left, upper, right, lower = box.unbind(-1)
        corners = self.x(left) + self.y(upper) + self.x(right) + self.y(lower)
        return corners + self.h(lower - upper) + self.w(right - left)


BOX = torch.tensor([[[0, 1, 4, 9], [2, 2, 3, 7], [5, 0, 9, 1]]])


@pytest.mark.parametrize("lowering", ["wide", "bmm", "grouped_conv", "vmap"])
@pytest.mark.parametrize("member", [Residual, TwoBranches])
def test_a_sum_leaves_the_members_own_additions_alone(member: type[nn.Module], lowering: str) -> None:
    check(Sum(member), X, lowering)


@pytest.mark.parametrize("lowering", ["wide", "bmm", "grouped_conv", "vmap"])
@pytest.mark.parametrize("mixture", [Mixture, MixtureInLoop])
def test_mean_and_variance_of_a_mixture(mixture: type[nn.Module], lowering: str) -> None:
    check(mixture(), X, lowering)


@pytest.mark.parametrize("lowering", ["grouped_conv", "vmap", "auto"])
def test_members_called_twice_among_others(lowering: str) -> None:
    check(Positions(), BOX, lowering)


def test_members_of_two_packs_are_added_up_together() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = nn.ModuleList(Gaussian() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros(2)
            for member in self.members:
                mu, log = member(x)
                total = total + mu + log
            return total

    fast = check(Both(), X, "wide")
    names = [getattr(node.target, "__name__", "") for node in fxopt.graphs(fast)[""].nodes]
    assert names.count("sum_members") == 2
    assert "unbind_members" not in names


def check(model: nn.Module, x: Tensor, lowering: str) -> nn.Module:
    """Fuse without verification, so that what was written is judged here; return the fused model."""
    passes = f"fuse_ensembles{{lowering={lowering}}}"
    fast = fxopt.optimize(model, passes, example_inputs=(x,), verify=False, measure=False)
    assert any(decision.status == "applied" for decision in fxopt.plan(fast).decisions)
    assert_equivalent(model, fast, (x,))
    return fast

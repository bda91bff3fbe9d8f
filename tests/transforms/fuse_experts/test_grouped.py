"""fuse_experts on graphs that multiply experts together already: what is read, and what only looks like it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixtures import EXPERTS, HIDDEN, WIDTH
from torch import Tensor, nn

import fxopt

K = 2


class Grouped(nn.Module):
    """Experts on pairs that are sorted by expert, as transformers computes them; subclasses read otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, *s) / 4) for s in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def slots(self, chosen: Tensor, other: Tensor) -> int:
        return chosen.size(-1)

    def folds(self, chosen: Tensor, other: Tensor) -> int:
        return chosen.shape[-1]

    def biases(self, given: Tensor, ordered: Tensor) -> Tensor:
        return self.bias[ordered]

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, other: Tensor) -> Tensor:
        given = chosen.reshape(-1)
        ordered, order = torch.sort(given)
        counts = torch.histc(ordered.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        up = F.grouped_mm(x[order // self.slots(chosen, other)], self.up, offs=ends)
        up = F.silu(up + self.biases(given, ordered))
        y = F.grouped_mm(up, self.down, offs=ends) * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0), device=order.device)
        return y[back].view(x.size(0), self.folds(chosen, other), WIDTH).sum(dim=1)


class DividesByAnother(Grouped):
    def slots(self, chosen: Tensor, other: Tensor) -> int:
        return other.size(0)


class FoldsByAnother(Grouped):
    def folds(self, chosen: Tensor, other: Tensor) -> int:
        return other.shape[0]


class BiasesInAnotherOrder(Grouped):
    def biases(self, given: Tensor, ordered: Tensor) -> Tensor:
        return self.bias[given]


class BiasesByPlace(Grouped):
    """As many pairs as experts: each has the bias of another expert."""

    def biases(self, given: Tensor, ordered: Tensor) -> Tensor:
        return self.bias


def call(tokens: int) -> tuple[Tensor, ...]:
    chosen = torch.stack([torch.randperm(EXPERTS)[:K] for _ in range(tokens)])
    return torch.randn(tokens, WIDTH), chosen, torch.rand(tokens, K), torch.zeros(K, 3)


def fused(model: nn.Module, given: tuple[Tensor, ...]) -> tuple[nn.Module, Any]:
    fast = fxopt.optimize(model, "fuse_experts{lowering=padded}", example_inputs=given, measure=False)
    (decision,) = fxopt.plan(fast).decisions
    return fast, decision


def test_sorted_pairs_are_read() -> None:
    given = call(5)
    fast, decision = fused(model := Grouped(), given)
    assert decision.status == "applied", decision.reason
    for each in (given, call(9)):
        torch.testing.assert_close(fast(*each), model(*each))


@pytest.mark.parametrize("cls", [DividesByAnother, FoldsByAnother, BiasesInAnotherOrder, BiasesByPlace])
def test_what_only_looks_like_it_stays(cls: type[Grouped]) -> None:
    _, decision = fused(cls(), call(EXPERTS // K))
    assert decision.status == "refused"
    assert "(grouped_mm), in a form that is not read" in decision.reason or "made outside" in decision.reason

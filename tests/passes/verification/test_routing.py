"""What is picked by data is picked anew in verification: experts are full or empty, tokens in another order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.passes.verification import Data, Verdict, reference, verify
from fxopt.tracing.examples import Inputs

Rows = Callable[[Tensor, Tensor, int], Tensor]


class Mixture(nn.Module):
    """Send each token to its best experts, whose rows `rows` names."""

    def __init__(self, rows: Rows, best: int, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.best = rows, best
        self.router = nn.Linear(8, 4, bias=bias)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 8)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.best)
        result = torch.zeros_like(tokens)
        for expert in range(4):
            taken = self.rows(tokens, (chosen == expert).any(-1), expert)
            weight = (weights * (chosen == expert)).sum(-1, keepdim=True)[taken]
            result = result.index_add(0, taken, weight * (tokens[taken] @ self.experts[expert]))
        return result.reshape(x.shape)


def right(tokens: Tensor, hit: Tensor, expert: int) -> Tensor:
    return torch.where(hit)[0]


WRONG: dict[str, Rows] = {
    "drops the last token of a full expert": lambda x, hit, e: torch.where(hit)[0][: len(x) - 1],
    "has a capacity": lambda x, hit, e: torch.where(hit)[0][: len(x) * 3 // 4],
    "reads a row where an expert is empty": lambda x, hit, e: torch.where(hit)[0] + 0 * torch.where(hit)[0][0],
    "reads one row of a full expert": lambda x, hit, e: hit.argmax()[None] if hit.all() else torch.where(hit)[0],
}  # fmt: skip


def judged(rows: Rows, best: int, bias: bool) -> Verdict:
    plain, other = Mixture(right, best, bias), Mixture(rows, best, bias)
    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))
    return verify(reference(fxopt.optimize(plain, [], example_inputs=(x,)), [Inputs(x)]), other)


@pytest.mark.parametrize(("best", "bias"), [(2, False), (1, True)])
def test_what_goes_wrong_with_full_or_empty_experts_is_caught(best: int, bias: bool) -> None:
    assert judged(right, best, bias).ok
    for what, rows in WRONG.items():
        assert not judged(rows, best, bias).ok, what


def test_rows_that_go_the_same_way_are_tried_where_something_is_picked() -> None:
    x = torch.randn(2, 8, 8)
    tried = reference(fxopt.optimize(Mixture(right, 1, True), [], example_inputs=(x,)), [Inputs(x)])
    assert sum(sample.data is Data.ALIKE for sample in tried.samples) >= 4
    plain = reference(fxopt.optimize(nn.Linear(8, 8), [], example_inputs=(x,)), [Inputs(x)])
    assert not any(sample.data is Data.ALIKE for sample in plain.samples)

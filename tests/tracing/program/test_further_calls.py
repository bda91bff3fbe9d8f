"""Capturing a captured model again: calls that its graphs are not for get graphs, too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime.graphs import required_capture


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 4) for _ in range(6))

    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        x = self.body(x)
        if flag:
            return torch.stack([head(x) for head in self.heads])
        return torch.relu(x) + torch.relu(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Switched(), Switched()

    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        return self.second(self.first(x), flag)


X = torch.randn(5, 8, generator=torch.Generator().manual_seed(7))


def statuses(model: nn.Module) -> list[tuple[str, str]]:
    return [(decision.pass_name, decision.status) for decision in fxopt.plan(model).decisions]


def optimized(model: nn.Module, passes: str, *arguments: object) -> nn.Module:
    return fxopt.optimize(model, passes, example_inputs=arguments, measure=False)


def test_what_only_further_calls_run_is_rewritten() -> None:
    torch.manual_seed(0)
    model = Switched().eval()
    plain = optimized(model, "fuse_ensembles", X)
    assert statuses(plain) == []
    fast = optimized(plain, "fuse_ensembles{lowering=bmm}", X, True)
    assert statuses(fast) == [("fuse_ensembles", "applied")]
    for arguments in ((X,), (X, True)):
        torch.testing.assert_close(fast(*arguments), model(*arguments))
    assert fxopt.report(fast).to_json()["missed"] == []


def test_rewritten_graphs_stay_beside_new_ones() -> None:
    torch.manual_seed(0)
    model = Outer().eval()
    first = optimized(model, "eliminate_common_subexpressions", X)
    fast = optimized(first, "fuse_ensembles{lowering=bmm}", X, True)
    done = statuses(fast)
    assert done[-1] == ("fuse_ensembles", "applied") and ("eliminate_common_subexpressions", "applied") in done
    assert [len(required_capture(module).specializations) for module in (fast, fast.second)] == [2, 2]
    for arguments in ((X,), (X, True)):
        torch.testing.assert_close(fast(*arguments), model(*arguments))
    torch.testing.assert_close(fxopt.restore(fast)(X, True), model(X, True))


def test_calls_that_graphs_are_for_add_none() -> None:
    model = optimized(Switched().eval(), "eliminate_common_subexpressions", X)
    again = optimized(model, "eliminate_common_subexpressions", X[:3])
    assert len(required_capture(again).specializations) == 1

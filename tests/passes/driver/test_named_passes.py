"""What a user names for more than speed is done, however little time there is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.compat.quantized import why_no_static_int8

X = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def net(*, training: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(16, 4)).train(training)


@pytest.mark.parametrize(
    ("name", "training"),
    [
        ("prune{method=structured,amount=0.5}", False),
        ("prune{amount=0.5}", False),
        ("prune{method=nm}", True),
        ("quantize{aim=size}", False),
        ("compress", False),
        ("qat", True),
        ("checkpoint{budget=0.5}", True),
        ("prune{method=structured},quantize{aim=size}", False),
    ],
)
def test_with_no_time_at_all_it_is_done(name: str, training: bool) -> None:
    if name == "compress" and why_no_static_int8():
        pytest.skip(why_no_static_int8())
    fast = fxopt.optimize(net(training=training), name, example_inputs=(X,), time_budget=0.001)
    decisions = fxopt.plan(fast).decisions
    applied = {decision.pass_name for decision in decisions if decision.status == "applied"}
    assert applied == {each.partition("{")[0] for each in fxopt.plan(fast).pipeline}
    assert {decision.status for decision in decisions} <= {"applied", "refused"}


def test_autocast_is_written_where_nothing_is_timed() -> None:
    fast = fxopt.optimize(net(), "autocast", example_inputs=(X,), time_budget=0, measure=False)
    assert {decision.status for decision in fxopt.plan(fast).decisions} == {"applied"}
    assert "only results of one call, in evaluation, were compared)" in str(fxopt.report(fast))

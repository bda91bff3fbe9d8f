"""Which forwards may use other parameters in another step, and what example calls show of a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.transforms.ddp.ddp import branching, run_trial_step


class Dropping(nn.Module):
    """Leave layers out at random."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < self.share:
                continue
            x = layer(x)
        return x


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.unread = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.unread(x)
        return self.norm(x) * self.table


@pytest.mark.parametrize(("share", "found"), [(0.5, "(root)"), (0.0, None)])
def test_layers_that_are_dropped_at_random(share: float, found: str | None) -> None:
    assert branching(fxopt.capture(Dropping(share).train(), torch.ones(2, 4))) == found


def test_dropout_is_no_branch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).train()
    assert branching(fxopt.capture(model, torch.ones(2, 4))) is None


def test_what_a_step_reaches_and_writes() -> None:
    program = fxopt.capture(Counting(), torch.randn(3, 4))
    before = {name: tensor.clone() for name, tensor in program.model.state_dict().items()}
    seen = run_trial_step(program)
    assert seen.unused == ("unread.weight", "unread.bias")
    assert seen.written == ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert all(torch.equal(tensor, before[name]) for name, tensor in program.model.state_dict().items())


def test_an_example_that_does_not_train_says_nothing() -> None:
    seen = run_trial_step(fxopt.capture(Counting().eval(), torch.randn(1, 4)))
    assert seen.unused == ()
    assert len(seen.written) == 4

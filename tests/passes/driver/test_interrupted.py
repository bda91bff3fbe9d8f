"""Ctrl-C, wherever it comes, leaves the user's model and process as they were; what passes did is logged."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
from typing import ClassVar

import pytest
import torch
from support.subtractions import Subtractions
from torch import Tensor, nn

import fxopt
from fxopt.passes import timing
from fxopt.passes.sites import Goal


class Net(nn.Module):
    """Four heads, and statistics that training would move."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.cat([head(x) for head in self.heads], dim=-1)) - 1.0


@dataclasses.dataclass(frozen=True)
class Subtract(Subtractions):
    """Write `a - b` as a call of torch.sub."""

    goal: ClassVar[Goal] = Goal.SPEED


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def interrupted(model: nn.Module, inplace: bool) -> None:
    state, training = copy.deepcopy(model.state_dict()), model.training
    threads, stream, classes = torch.get_num_threads(), torch.get_rng_state(), [type(m) for m in model.modules()]
    with pytest.raises(KeyboardInterrupt):
        fxopt.optimize(model, Subtract(), example_inputs=(X,), inplace=inplace)
    assert gc.isenabled()
    assert (torch.get_num_threads(), model.training, [type(m) for m in model.modules()]) == (threads, training, classes)
    assert torch.equal(torch.get_rng_state(), stream)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("number", [1, 20, 60])
def test_in_an_operation_of_the_model(number: int, inplace: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, forward = [0], nn.Linear.forward

    def counted(self: nn.Linear, x: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == number:
            raise KeyboardInterrupt
        return forward(self, x)

    model = Net()
    monkeypatch.setattr(nn.Linear, "forward", counted)
    interrupted(model, inplace)


@pytest.mark.parametrize("inplace", [False, True])
def test_while_candidates_are_timed(inplace: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(timing.Runner, "__call__", stop)
    interrupted(Net(), inplace)


def test_passes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="fxopt"):
        fxopt.optimize(Net().eval(), ["fold_constants", Subtract()], example_inputs=(X,), measure=False)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert sum(level == "INFO" for level, _ in said) == 2
    assert any(level == "DEBUG" and "applied" in text for level, text in said)

"""What is said of a decision by data names the user's own condition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt


class Decides(nn.Module):
    """Add or take one, by the data, before four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        else:
            x = x - 1
        return torch.stack([head(x) for head in self.heads])


def test_a_missed_decision_by_data_quotes_the_line_that_decided() -> None:
    model = Decides().eval()
    fast = fxopt.optimize(model, "fuse_ensembles{lowering=bmm}", example_inputs=(torch.ones(5, 8),), measure=False)
    torch.testing.assert_close(fast(-torch.ones(5, 8)), model(-torch.ones(5, 8)))
    text = str(fxopt.report(fast))
    assert "'if x.sum() > 0' (at test_conditions_in_messages.py:" in text
    assert "depends on data, and was True at capture" in text
    assert "gt" not in text


def test_a_condition_that_cannot_be_read_is_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linecache.getline", lambda *_: "")
    fast = fxopt.optimize(
        Decides().eval(), "fuse_ensembles{lowering=bmm}", example_inputs=(torch.ones(5, 8),), measure=False
    )
    fast(-torch.ones(5, 8))
    assert "a condition (at test_conditions_in_messages.py:" in str(fxopt.report(fast))


class Folds(nn.Module):
    """Whose control flow needs a size of what is computed on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3)
        self.heads = nn.ModuleList(nn.Linear(1, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).transpose(1, 2)
        if h.shape[1] > 1:
            h = h + 1
        return torch.stack([head(h) for head in self.heads])


def test_a_warning_quotes_the_line_that_needs_a_value() -> None:
    fast = fxopt.optimize(
        Folds().eval(), "fuse_ensembles{lowering=bmm}", example_inputs=(torch.ones(2, 1, 8),), measure=False
    )
    with pytest.warns(fxopt.GuardWarning, match=r"in which 'if h.shape\[1\] > 1' \(at [\w.]+:\d+\) finds"):
        calls(fast, torch.ones(2, 1, 3))


def calls(model: nn.Module, x: Tensor) -> None:
    for _ in range(20):
        model(x)

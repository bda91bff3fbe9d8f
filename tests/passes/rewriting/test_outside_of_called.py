"""Activations and norms that read what is outside of them, or what their children hold: changes are seen."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt

SLOPE = 0.1


class OfClass(nn.Module):
    slope: ClassVar[float] = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.slope)


class Global(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, SLOPE)


class OfChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.drop.p)


class Norm(nn.BatchNorm2d):
    slope: ClassVar[float] = 0.1

    def forward(self, input: Tensor) -> Tensor:
        normed = F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias)
        return F.leaky_relu(normed, self.slope)


def change(kind: type[nn.Module], model: nn.Module, patch: pytest.MonkeyPatch) -> None:
    if kind is Global:
        patch.setitem(globals(), "SLOPE", 0.9)
    elif kind is OfChild:
        for held in model.modules():
            if isinstance(held, nn.Dropout):
                held.p = 0.9
    else:
        patch.setattr(kind, "slope", 0.9)


class Heads(nn.Module):
    """An ensemble of small convolutional networks with one activation each."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 8, 3), kind(), nn.Conv2d(8, 2, 1)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads])


CASES = [("pack", OfClass), ("pack", Global), ("pack", OfChild), ("fold_batchnorm", Norm)]
CASES += [(passes, kind) for passes in ("fuse_ensembles", "inference") for kind in (OfClass, Global, OfChild)]


@pytest.mark.parametrize(("passes", "kind"), CASES)
def test_changes_are_seen(passes: str, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if passes in ("fuse_ensembles", "inference"):
        model = Heads(kind).eval()
    else:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), Norm(8) if kind is Norm else kind()).eval()
    x = torch.randn(2, 3, 8, 8)
    fast = fxopt.optimize(model, passes, example_inputs=x, measure=False)
    with torch.no_grad():
        before = model(x)
        assert (passes == "fuse_ensembles") <= bool(fxopt.plan(fast).decisions)
        torch.testing.assert_close(fast(x), before, rtol=1e-4, atol=1e-4)
        for each in (model, fast):
            change(kind, each, monkeypatch)
        assert not torch.allclose(model(x), before)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)

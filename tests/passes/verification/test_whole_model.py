"""The whole model is compared under draws that are the same in every run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxopt.passes.verification import Original
from fxopt.tracing.values import Inputs

SEEN: list[Tensor] = []
"""What the model computed; what it holds itself is put back."""


class Dropping(nn.Module):
    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        dropped = torch.dropout(x.sin(), self.chance, train=True)
        SEEN.append(dropped)
        return dropped


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_dropout_keeps_and_scales_all(chance: float) -> None:
    model, x = Dropping(chance), torch.linspace(0.1, 1.0, 5)
    assert Original(model, [Inputs(x)]).repeats()
    torch.testing.assert_close(SEEN[-1], x.sin() / (1 - chance))

"""What reports call the places of static int8: the layers, also where graphs of modules around them are rewritten."""

from __future__ import annotations

import torch
from torch import nn

import fxopt


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).sin() + self.two(x).cos()


def test_a_place_of_one_layer_has_the_name_of_that_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Tanh()).eval()
    fast = fxopt.optimize(model, "quantize{scheme=int8_static}", example_inputs=torch.randn(32, 16), measure=False)
    labels = [each.label for each in fxopt.plan(fast).decisions if each.status == "applied"]
    assert labels == ["0.one", "0.two"]

"""Quantization within a budget of accuracy: weights of 4 bits, and of 8 where 4 cost too much.

`metric` is a function of yours, `drop` how much of it may be lost: layers stay in float until that holds.

Run it: python examples/quantized.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxopt
from fxopt.transforms.quantize import Quantize

DROP = 0.02


def data(rows: int) -> tuple[Tensor, Tensor]:
    """Return points [rows, 2] of two spirals, and which of them each is of."""
    angle, label = 6.0 * torch.rand(rows), torch.arange(rows) % 2
    turned = angle + torch.pi * label
    return angle[:, None] * torch.stack([turned.cos(), turned.sin()], -1) / 6.0 + 0.02 * torch.randn(rows, 2), label


def trained(steps: int) -> nn.Module:
    """Return a classifier of the two spirals."""
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        x, label = data(256)
        optimizer.zero_grad()
        F.cross_entropy(model(x), label).backward()
        optimizer.step()
    return model.eval()


def main(steps: int = 150) -> tuple[float, float]:
    """Train, quantize, print and return the accuracy before and after."""
    torch.manual_seed(0)
    model, (x, label) = trained(steps), data(1000)

    @torch.no_grad()
    def accuracy(net: nn.Module) -> float:
        return (net(x).argmax(-1) == label).float().mean().item()

    pass_ = Quantize(scheme="int4_weight", bits="mixed", aim="size", metric=accuracy, drop=DROP)
    small = fxopt.optimize(model, pass_, example_inputs=x)
    print(fxopt.report(small))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.fxopt"
        fxopt.save(small, path)
        loaded = fxopt.load(path, model=trained(0))
    before, after = accuracy(model), accuracy(loaded)
    print(f"accuracy: {before:.1%} in float32, {after:.1%} in small numbers")
    return before, after


if __name__ == "__main__":
    main()

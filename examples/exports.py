"""Exports: an optimized model as a `.pt2` file, which runs where neither the model's code nor fxopt is installed.

Run it: python examples/exports.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import fxopt


class Pictures(nn.Module):
    """A small network for images, as they are trained: with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        """Return [batch, 4] for images [batch, 3, height, width]."""
        return self.head(self.body(images).mean((2, 3)))


def main() -> list[float]:
    """Export, print and return the largest difference for batches of several sizes."""
    torch.manual_seed(0)
    model, images = Pictures().eval(), torch.randn(2, 3, 16, 16)
    fast = fxopt.optimize(model, "inference", example_inputs=images)
    print(fxopt.report(fast))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pictures.pt2"
        fxopt.export(fast, path, example_inputs=images)
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")
        exported = torch.export.load(path).module()  # as anybody would, who has torch alone
    batches = [torch.randn(size, 3, 16, 16) for size in (1, 2, 7)]
    with torch.no_grad():
        errors = [(exported(batch) - model(batch)).abs().max().item() for batch in batches]
    print("largest differences: " + ", ".join(f"{error:.1e}" for error in errors))
    return errors


if __name__ == "__main__":
    main()

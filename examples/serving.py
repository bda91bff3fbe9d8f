"""Serving: an archive is loaded, and answers requests of any size from several threads; new weights come in between.

The archive is made once, with all checks and timings; loading it takes none of them again.

Run it: python examples/serving.py
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

import fxopt

SIZES = (1, 2, 5, 16, 3, 1, 8, 7)


def classifier() -> nn.Module:
    """Return a network for tables of 32 columns, whose norms have seen data."""
    layers = [nn.BatchNorm1d(32), nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)]
    model = nn.Sequential(*layers).train()
    with torch.no_grad():
        for _ in range(3):
            model(2.0 * torch.randn(64, 32) + 1.0)
    return model.eval()


@torch.inference_mode()
def answers(model: nn.Module, requests: list[Tensor]) -> list[Tensor]:
    """Answer each request in one of four threads."""
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(torch.inference_mode()(model), requests))


def main() -> int:
    """Serve, print the report, and return how many answers were those of the plain model."""
    torch.manual_seed(0)
    plain = classifier()
    fast = fxopt.optimize(plain, "inference", example_inputs=[torch.randn(1, 32), torch.randn(16, 32)])
    print(fxopt.report(fast))
    requests = [torch.randn(size, 32) for size in SIZES]
    with tempfile.TemporaryDirectory() as folder:
        fxopt.save(fast, Path(folder) / "classifier.fxopt")
        served = fxopt.load(Path(folder) / "classifier.fxopt", model=classifier())
    equal = 0
    for weights in (plain.state_dict(), classifier().state_dict()):  # those that were trained since
        plain.load_state_dict(weights)
        served.load_state_dict(weights)
        pairs = zip(answers(served, requests), answers(plain, requests), strict=True)
        equal += sum(torch.allclose(given, expected, atol=1e-5) for given, expected in pairs)
    print(f"{equal} of {2 * len(requests)} answers are those of the plain model")
    return equal


if __name__ == "__main__":
    main()

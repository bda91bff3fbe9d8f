"""How the tests of passes train a model and its rewritten twin side by side."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture
def step() -> Callable[..., Tensor]:
    """Return a function that trains a model for one step and gives the loss before it."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run

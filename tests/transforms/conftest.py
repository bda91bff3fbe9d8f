"""How the tests of passes train a model and its rewritten twin side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, distributed, nn


@pytest.fixture
def one_process() -> Iterator[None]:
    """Initialize a process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


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

"""Training steps of a whole model: forward, backward, optimizer."""

from __future__ import annotations

import torch
from torch import distributed, nn

import fxopt

from .models import Loss, Make
from .way import Step

__all__ = ["by_pass", "training_step"]


def by_pass(make: Make, passes: str) -> Step:
    """Return a step of what `fxopt.optimize` makes of a model."""
    model, loss, inputs = make()
    return training_step(fxopt.optimize(model.train(), passes, example_inputs=inputs), loss)


def training_step(model: nn.Module, loss: Loss) -> Step:
    """Return a step of a model; what it draws depends on the rank."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    torch.manual_seed(distributed.get_rank())

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step

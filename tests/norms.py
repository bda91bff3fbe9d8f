"""What the tests of folding make models of: norms with statistics of their own, and reasons out of plans."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fxopt

IMAGE = (2, 3, 7, 7)


def shaken(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every norm statistics of its own, as training would, and return the model in evaluation mode."""
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module.running_mean is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.3, 3.0)
            for parameter in module.parameters():
                nn.init.normal_(parameter)
    return model.eval()


class Block(nn.Module):
    def __init__(self, layer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.layer(x)))


def block(**options: object) -> Block:
    torch.manual_seed(0)
    return shaken(Block(nn.Conv2d(3, 6, 3, **options), nn.BatchNorm2d(6)))


def applied(model: nn.Module) -> int:
    return [d.status for d in fxopt.plan(model).decisions].count("applied")


def same_state(one: nn.Module, fast: nn.Module) -> bool:
    expected, found = one.state_dict(), fxopt.state_dict(fast)
    return list(expected) == list(found) and all(torch.equal(expected[name], found[name]) for name in expected)


def folded(model: nn.Module, *inputs: Tensor, **options: Any) -> nn.Module:
    """Return the model with its norms folded, untimed unless told; by default on random images."""
    options.setdefault("measure", False)
    return fxopt.optimize(model, "fold_batchnorm", example_inputs=inputs or (torch.randn(IMAGE),), **options)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def reasons(fast: nn.Module) -> list[str]:
    """Return the reason of each decision; "" where a norm was folded."""
    return [decision.reason for decision in fxopt.plan(fast).decisions]

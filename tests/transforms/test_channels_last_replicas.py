"""channels_last under DDP and FSDP: two processes train as one would train the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn, optim
from torch.distributed.tensor import DTensor

import fxopt


class Network(nn.Module):
    """Convolutions with norms and a residual, all of which take any order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        return self.head(torch.flatten(self.pool(torch.relu(y + self.second(y))), 1))


def stepped(model: nn.Module, x: Tensor, *, averaged: bool) -> list[Tensor]:
    """Return the whole parameters after three steps, of which gradients are averaged by hand where they are not."""
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        for parameter in model.parameters() if not averaged else ():
            assert parameter.grad is not None
            distributed.all_reduce(parameter.grad)
            parameter.grad /= 2
        optimizer.step()
    found = [parameter.detach() for parameter in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


def _trained(passes: str) -> tuple[float, list[str]]:
    torch.manual_seed(0)
    model = Network().double()
    plain, x = copy.deepcopy(model), torch.randn(4, 3, 10, 10, dtype=torch.float64)
    own = x[2 * distributed.get_rank() :][:2]
    fast = fxopt.optimize(model, passes, example_inputs=own, measure=False)
    applied = [each.pass_name for each in fxopt.plan(fast).decisions if each.status == "applied"]
    pairs = zip(stepped(fast, own, averaged=True), stepped(plain, own, averaged=False), strict=True)
    return max(float((mine - expected).abs().max()) for mine, expected in pairs), applied


def on_rank_replicated() -> tuple[float, list[str]]:
    return _trained("channels_last,ddp")


def on_rank_sharded() -> tuple[float, list[str]]:
    return _trained("channels_last,fsdp")


@pytest.mark.parametrize(("way", "name"), [("replicated", "ddp"), ("sharded", "fsdp")])
def test_they_train_as_the_model_does(of_ranks: list[dict[str, Any]], way: str, name: str) -> None:
    for each in of_ranks:
        error, applied = each[way]
        assert error < 1e-9
        assert set(applied) == {"channels_last", name}

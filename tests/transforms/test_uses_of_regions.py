"""Uses of models in which regions run: copies, replicas, tensors from outside, children that were replaced."""

from __future__ import annotations

import copy
import io
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.tracing.program import capture_program

X = torch.randn(4, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            offset = self.layers[0](self.stem(x).relu()).tanh()
        return self.head(x).relu() + offset + self.layers[1](x).tanh()


def replica_of(model: nn.Module, memo: dict[nn.Module, nn.Module]) -> nn.Module:
    """Do what `torch.nn.parallel.replicate` does, which knows GPUs only: shallow copies, given tensors and children."""
    if model not in memo:
        memo[model] = replica = cast("Any", model)._replicate_for_data_parallel()
        for name, child in model.named_children():
            setattr(replica, name, replica_of(child, memo))
        for name, tensor in (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False)):
            setattr(replica, name, tensor.detach().clone().requires_grad_(tensor.requires_grad))
    return memo[model]


@pytest.fixture(params=["autocast", "checkpoint{budget=0}", "autocast,checkpoint{budget=0}"])
def pair(request: pytest.FixtureRequest) -> tuple[Net, Net]:
    model = Net()
    fast = fxopt.optimize(model, request.param, example_inputs=(X,), measure=False)
    assert any(decision.status == "applied" for decision in fxopt.plan(fast).decisions)
    return model, fast


def assert_close(given: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(given, expected, rtol=0.05, atol=0.05)  # autocast rounds to bfloat16


def test_regions_work_on_the_tensors_and_children_of_their_owner(pair: tuple[Net, Net]) -> None:
    model, fast = pair
    for listing in (nn.Module.named_modules, nn.Module.named_children):
        assert [name for name, _ in listing(fast)] == [name for name, _ in listing(model)]
    assert repr(fast) == repr(model)
    given, before = {name: p * 0 for name, p in model.named_parameters()}, list(fast.parameters())
    assert_close(torch.func.functional_call(fast, given, (X,)), torch.zeros(4, 8))
    assert all(now is then for now, then in zip(fast.parameters(), before, strict=True))
    fast.layers[0] = model.layers[0] = nn.Linear(8, 8)  # under no_grad
    fast.layers[1] = model.layers[1] = nn.Linear(8, 8)
    fast._modules["head"] = model.head = nn.Linear(8, 8)
    assert_close(fast(X), model(X))
    fast.eval()
    assert not any(module.training for module in capture_program(fast).names.distinct)


def test_copies_and_replicas_run_on_their_own_children(pair: tuple[Net, Net]) -> None:
    model, fast = pair
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    copies = [copy.deepcopy(fast), torch.load(file, weights_only=False), cast("Net", replica_of(fast, {}))]
    for copied in copies:
        assert_close(copied(X), model(X))
        with torch.no_grad():
            for layer in (copied.stem, copied.head, *copied.layers):
                layer.weight.zero_()
                layer.bias.zero_()
        assert_close(copied(X), torch.zeros(4, 8))
    assert_close(fast(X), model(X))


def test_in_place_and_back(pair: tuple[Net, Net]) -> None:
    model, fast = pair
    restored = fxopt.restore(fast)
    assert vars(restored).keys() == vars(model).keys()
    mine = copy.deepcopy(model)
    assert fxopt.optimize(mine, "autocast", example_inputs=(X,), measure=False, inplace=True) is mine
    mine.stem = model.stem = nn.Linear(8, 8)
    assert_close(mine(X), model(X))


def test_a_container_with_a_region_takes_other_items() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh())
    fast = fxopt.optimize(model, "autocast", example_inputs=(X,), measure=False)
    fast[1] = model[1] = nn.Linear(8, 8)
    assert_close(fast(X), model(X))
    del fast[1], model[1]
    with pytest.warns(fxopt.GuardWarning, match="it has 4 children"):
        assert_close(fast(X), model(X))

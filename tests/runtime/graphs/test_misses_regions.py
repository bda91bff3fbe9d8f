"""Calls that no graph fits, of forwards that open contexts or are given objects: the original forward answers."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxopt
from fxopt.runtime.graphs import capture_of, fallback_of

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Contexts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, double: bool = False) -> Tensor:
        with torch.no_grad():
            known = self.first(x) * self.scale
        if not double:
            return self.second(known + x * self.scale)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = self.second(x + known)
            with torch.no_grad():
                known = mixed * 2 + self.first(x)
        return mixed.float() + known.float() * 2


class Checkpointed(Contexts):
    def forward(self, x: Tensor, double: bool = False) -> Tensor:
        if double:
            return checkpoint(self.second, x, use_reentrant=False) * 2
        return self.second(x)


def gradients(model: nn.Module, *args: Any) -> list[Tensor | None]:
    model.zero_grad()
    model(*args).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("cls", [Contexts, Checkpointed])
@pytest.mark.parametrize("training", [False, True])
def test_contexts(cls: type[nn.Module], training: bool) -> None:
    model = cls().train(training)
    fast: Any = fxopt.capture(copy.deepcopy(model), (X,)).model
    names = list(fast.state_dict())
    for double in (False, True, True, False, True):
        assert torch.equal(fast(X, double), model(X, double))
        for mine, other in zip(gradients(fast, X, double), gradients(model, X, double), strict=True):
            assert (mine is None) == (other is None)
            if mine is not None and other is not None:
                torch.testing.assert_close(mine, other)
    assert sum(fallback_of(fast).misses.values()) == 6
    assert len(capture_of(fast).specializations) == 1
    assert list(fast.state_dict()) == names
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        reference = copy.deepcopy(model)
        assert torch.equal(other(X, True), reference(X, True))
        assert sum(fallback_of(other).misses.values()) == 7


def test_a_child_replaced_afterwards_is_seen_inside_of_a_context() -> None:
    model = Contexts().eval()
    fast: Any = fxopt.capture(copy.deepcopy(model), (X,)).model
    assert torch.equal(fast(X, True), model(X, True))
    child = nn.Linear(4, 4)
    fast.first = model.first = child
    for double in (True, False):
        assert torch.equal(fast(X, double), model(X, double))


class Grown:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.calls = 0


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, grown: Grown) -> Tensor:
        grown.kept.append(self.linear(x))
        return torch.cat(grown.kept)


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = Inner(), nn.Linear(4, 4)

    def forward(self, x: Tensor, grown: Grown, double: bool = False) -> Tensor:
        grown.calls += 1
        y = self.outer(self.inner(x, grown)).sum(0)
        return y * 2 if double else y


def test_objects() -> None:
    model = Keeps()
    fast: Any = fxopt.capture(copy.deepcopy(model), [(X, Grown())]).model
    for double in (False, True, True, False, True):
        mine, other = Grown(), Grown()
        for count in (1, 2):
            torch.testing.assert_close(fast(X, mine, double), model(X, other, double))
            assert mine.calls == other.calls == count and len(mine.kept) == len(other.kept) == count
            assert all(map(torch.allclose, mine.kept, other.kept))
    assert sum(fallback_of(fast).misses.values()) >= 1


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, grown: Any, double: bool = False) -> Tensor:
        grown.kept[0].add_(1)
        y = self.linear(x) + grown.kept[0]
        return y * 2 if double else y


class Locked(Grown):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def filled(cls: type[Grown]) -> Grown:
    grown = cls()
    grown.kept.append(torch.zeros(4))
    return grown


@pytest.mark.parametrize("cls", [Grown, Locked])
def test_objects_that_cannot_be_put_back(cls: type[Grown]) -> None:
    model = Writes()
    fast: Any = fxopt.capture(copy.deepcopy(model), [(X, filled(Grown))]).model
    mine, other = filled(cls), filled(cls)
    for double in (True, True, True):
        assert torch.equal(fast(X, mine, double), model(X, other, double))
        assert torch.equal(mine.kept[0], other.kept[0])
    assert sum(fallback_of(fast).misses.values()) == 3

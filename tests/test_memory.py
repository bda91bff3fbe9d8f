"""Nothing that is remembered between calls keeps a user's classes alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.tracing.values import cached_by_class


def fresh_classes() -> tuple[type[nn.Module], type[nn.Module]]:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x)).relu()

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(Head() for _ in range(3))
            self.scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([head(x) for head in self.heads], -1) * self.scale

    return Heads, Head


def classes_after_optimizing(**options: bool) -> list[weakref.ref[type[nn.Module]]]:
    whole, part = fresh_classes()
    fast = fxopt.optimize(whole().eval(), "inference", example_inputs=(torch.randn(2, 4),), **options)
    fast(torch.randn(3, 4))
    fxopt.restore(fast)
    return [weakref.ref(whole), weakref.ref(part)]


def collect() -> None:
    for _ in range(5):  # classes made of classes go one after the other
        gc.collect()


@pytest.mark.parametrize(("count", "spare"), [(40, True), (2, False)])
def test_optimize_keeps_no_class_alive(count: int, spare: bool) -> None:
    options = {"verify": False, "measure": False} if spare else {}
    known = [one for _ in range(count) for one in classes_after_optimizing(**options)]
    collect()
    assert not [one() for one in known if one() is not None]


def test_answers_about_classes_are_remembered_as_long_as_they_live() -> None:
    asked: list[str] = []

    def depth(cls: type) -> int:
        asked.append(cls.__name__)
        return len(cls.__mro__)

    cached = cached_by_class(depth)
    whole, part = fresh_classes()
    assert [cached(whole), cached(part), cached(whole)] == [3, 3, 3]
    assert asked == ["Heads", "Head"]
    del whole, part
    collect()
    whole, _part = fresh_classes()
    assert (cached(whole), asked) == (3, ["Heads", "Head", "Heads"])

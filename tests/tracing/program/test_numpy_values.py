"""Numpy in forwards: numbers made of settings are constants; all else is opaque, with the reason, and never stale."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxopt

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def ones() -> Any:
    return np.ones(4, dtype=np.float32)


class Settings:
    def __init__(self) -> None:
        self.scale, self.table, self.dim, self.limit = np.float64(2), ones(), 4, float("inf")


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.dim, self.scale, self.wide = 4, np.float32(2.5), np.float64(3)
        self.table, self.doubles = ones(), np.ones(4)
        self.settings = Settings()
        self.numbers = {"scale": np.float32(2)}


CAPTURED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "square root of an attribute": lambda self, x: self.linear(x) / np.sqrt(self.dim),
    "square root of a setting": lambda self, x: self.linear(x) / np.sqrt(self.settings.dim),
    "number": lambda self, x: self.linear(x) * self.scale,
    "wide number": lambda self, x: self.linear(x) * self.wide,
    "setting that is infinite": lambda self, x: self.linear(x) if self.settings.limit > 5 else x,
    "table": lambda self, x: self.linear(x) + torch.from_numpy(self.table),
    "table as a tensor": lambda self, x: self.linear(x) + torch.tensor(self.table),
}
OPAQUE: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "square root of a size": (lambda self, x: self.linear(x) / np.sqrt(x.shape[-1]), "it gives a value to numpy"),
    "product of a shape": (lambda self, x: self.linear(x).reshape(np.prod(x.shape)), "numpy"),
    "there and back": (
        lambda self, x: torch.from_numpy(np.tanh(x.detach().numpy())) + self.linear(x),
        "it turns a tensor into a numpy array",
    ),
    "function of a tensor": (lambda self, x: self.linear(x) + torch.as_tensor(np.asarray(x)), "numpy array"),
    "item of a table": (lambda self, x: self.linear(x) * float(self.table[1]), "it reads the numpy value self.table"),
    "item of a wide table": (lambda self, x: self.linear(x) * self.doubles[1], "it reads the numpy value self.doubles"),
    "setting": (lambda self, x: self.linear(x) * float(self.settings.scale), "it reads the numpy value"),
    "in a dictionary": (lambda self, x: self.linear(x) * float(self.numbers["scale"]), "it reads the numpy value"),
}


def made(forward: Callable[[Any, Tensor], Tensor]) -> Any:
    return type("Made", (Holder,), {"forward": lambda self, x: forward(self, x)})()


def _set(model: Any) -> None:
    model.dim, model.scale, model.wide, model.settings.dim = 9, np.float32(7), np.float64(5), 16
    model.settings.scale, model.settings.limit = np.float64(7), 1.0
    model.numbers["scale"], model.table = np.float32(8), ones() * 3


def _write(model: Any) -> None:
    for table in (model.table, model.doubles, model.settings.table):
        table *= 3


def assert_never_stale(fast: Any, model: Any) -> None:
    torch.testing.assert_close(fast(X), model(X))
    for change in (_write, _set, _write):
        for one in (fast, model):
            change(one)
        for _ in range(2):
            torch.testing.assert_close(fast(X), model(X))


@pytest.mark.parametrize("name", CAPTURED)
def test_captured(name: str) -> None:
    model = made(CAPTURED[name])
    program = fxopt.capture(copy.deepcopy(model), (X,))
    assert not program.opaque
    assert_never_stale(program.model, model)


@pytest.mark.parametrize("name", OPAQUE)
def test_opaque_with_the_reason(name: str) -> None:
    forward, reason = OPAQUE[name]
    model = made(forward)
    program = fxopt.capture(copy.deepcopy(model), (X,))
    assert reason in program.opaque[""].reason
    with torch.no_grad():
        assert_never_stale(program.model, model)

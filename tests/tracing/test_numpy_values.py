"""Numpy in forwards: captured where it computes with plain numbers, else opaque with the reason, and never stale."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxopt

X = torch.linspace(-1, 1, 12).reshape(3, 4)
CONSTANT = np.ones(4, dtype=np.float32)


def ones() -> Any:
    return np.ones(4, dtype=np.float32)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.dim, self.scale, self.count = 4, np.float32(2.5), np.int64(3)
        self.table, self.flags = ones(), np.array([True, False])
        self.settings = SimpleNamespace(
            scale=np.float32(2), table=ones(), count=np.int64(2), flag=np.bool_(True), limit=float("inf"), bad=np.nan
        )
        self.numbers, self.row = {"scale": np.float32(2), "table": ones()}, [np.float32(2)]
        self.child = nn.Identity()
        self.child.scale, self.child.table = np.float32(2), ones()


CAPTURED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "square root of a size": lambda self, x: self.linear(x) / np.sqrt(x.shape[-1]),
    "on the left": lambda self, x: np.sqrt(x.shape[0]) * self.linear(x),
    "square root of an attribute": lambda self, x: self.linear(x) / np.sqrt(self.dim),
    "product of a shape": lambda self, x: self.linear(x).reshape(np.prod(x.shape)),
    "product of a part": lambda self, x: self.linear(x).reshape(int(np.prod(x.shape[:1])), -1),
    "rounded": lambda self, x: self.linear(x)[: int(np.ceil(x.shape[0] / 2))],
    "largest": lambda self, x: self.linear(x) * np.maximum(x.shape[0], 2),
    "decides": lambda self, x: self.linear(x) if np.log2(x.shape[0]) < 2 else x,
    "scalar": lambda self, x: self.linear(x) * self.scale,
    "scalar on the left": lambda self, x: self.scale * self.linear(x),
    "index": lambda self, x: self.linear(x)[:, : self.count],
    "setting": lambda self, x: self.linear(x) * float(self.settings.scale),
    "setting that decides": lambda self, x: self.linear(x) if self.settings.flag else x,
    "setting that is infinite": lambda self, x: self.linear(x) if self.settings.limit > 5 else x,
    "setting that is no number": lambda self, x: self.linear(x) if self.settings.bad < 5 else x,
    "table of a setting": lambda self, x: self.linear(x) + torch.from_numpy(self.settings.table),
    "in a dictionary": lambda self, x: self.linear(x) * self.numbers["scale"],
    "in a list": lambda self, x: self.linear(x) * self.row[0],
    "of a child": lambda self, x: self.linear(x) * self.child.scale,
    "table": lambda self, x: self.linear(x) + torch.from_numpy(self.table),
    "table as a tensor": lambda self, x: self.linear(x) + torch.tensor(self.table),
    "sum of a table": lambda self, x: self.linear(x) * float(self.table.sum()),
    "item of a table": lambda self, x: self.linear(x) * self.table[1],
    "flag of a table": lambda self, x: self.linear(x) if self.flags[0] else x,
    "list of a table": lambda self, x: self.linear(x) + torch.tensor(self.table.tolist()),
}
OPAQUE: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "there and back": (
        lambda self, x: torch.from_numpy(np.tanh(x.detach().numpy())) + self.linear(x),
        "it turns a tensor into a numpy array",
    ),
    "function of a tensor": (
        lambda self, x: self.linear(x) + torch.as_tensor(np.asarray(x)),
        "it turns a value into a numpy array",
    ),
    "row of a table": (
        lambda self, x: self.linear(x) + torch.from_numpy(self.table[:]),
        "a numpy array that is no attribute of the module",
    ),
    "table in a dictionary": (
        lambda self, x: self.linear(x) + torch.from_numpy(self.numbers["table"]),
        "a numpy array that is no attribute of the module",
    ),
    "table of a child": (
        lambda self, x: self.linear(x) + torch.from_numpy(self.child.table),
        "a numpy array that is no attribute of the module",
    ),
    "constant": (
        lambda self, x: self.linear(x) + torch.from_numpy(CONSTANT),
        "a numpy array that is no attribute of the module",
    ),
    "made of a size": (
        lambda self, x: self.linear(x) + torch.from_numpy(np.ones(x.shape[-1], dtype=np.float32)),
        "a numpy array that is no attribute of the module",
    ),
    "random": (lambda self, x: self.linear(x) * np.random.rand(), "random numbers that are not torch's"),
}


def made(forward: Callable[[Any, Tensor], Tensor]) -> Any:
    return type("Made", (Holder,), {"forward": lambda self, x: forward(self, x)})()


def _set(model: Any) -> None:
    model.dim, model.scale, model.count = 9, np.float32(7), np.int64(2)
    model.settings.scale, model.settings.flag, model.settings.limit = np.float32(7), np.bool_(False), 1.0
    model.settings.bad, model.numbers["scale"], model.row[0] = 3.0, np.float32(8), np.float32(9)
    model.child.scale, model.table = np.float32(6), ones() * 3


def _write(model: Any) -> None:
    for table in (model.table, model.settings.table, model.numbers["table"], model.child.table):
        table *= 3
    model.flags[0] = False


def _replace(model: Any) -> None:
    model.settings.table, model.numbers["table"], model.child.table = ones() * 5, ones() * 6, ones() * 7


def assert_never_stale(fast: Any, model: Any, x: Tensor) -> None:
    torch.testing.assert_close(fast(x), model(x))
    for change in (_set, _write, _replace):
        for one in (fast, model):
            change(one)
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("name", CAPTURED)
def test_captured(name: str) -> None:
    model = made(CAPTURED[name])
    program = fxopt.capture(copy.deepcopy(model), (X,))
    assert not program.opaque
    for size in (3, 5, 1):
        torch.testing.assert_close(program.model(X[:1].repeat(size, 1)), model(X[:1].repeat(size, 1)))
    assert_never_stale(program.model, model, X)


@pytest.mark.parametrize("name", CAPTURED)
def test_optimized(name: str) -> None:
    model = made(CAPTURED[name])
    fast = fxopt.optimize(model, "eliminate_common_subexpressions,fold_constants", example_inputs=(X,))
    assert_never_stale(fast, model, X)


@pytest.mark.parametrize("name", OPAQUE)
def test_opaque_with_the_reason(name: str) -> None:
    forward, reason = OPAQUE[name]
    model = made(forward)
    program = fxopt.capture(copy.deepcopy(model), (X,))
    assert reason in program.opaque[""].reason
    if name != "random":
        with torch.no_grad():
            assert_never_stale(program.model, model, X)


def test_large_tables_are_not_compared() -> None:
    model = made(lambda self, x: self.linear(x) + torch.from_numpy(self.table)[: x.shape[-1]])
    model.table = np.ones(10_000, dtype=np.float32)
    program = fxopt.capture(copy.deepcopy(model), (X,))
    assert not program.opaque
    assert_never_stale(program.model, model, X)
    model = made(lambda self, x: self.linear(x) * float(self.table[3]))
    model.table = np.ones(10_000, dtype=np.float32)
    program = fxopt.capture(copy.deepcopy(model), (X,))
    assert "it reads self.table, a large numpy array that may change" in program.opaque[""].reason
    assert_never_stale(program.model, model, X)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) / np.sqrt(x.shape[-1])


def test_graphs_with_numpy_can_be_copied_and_pickled() -> None:
    fast = fxopt.capture(Scaled(), (X,)).model
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(other(X), fast(X))

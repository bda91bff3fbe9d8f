"""What the forwards of the modules that flatten_calls wrote out read, changed afterwards: they are called as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxopt

OFFSET = 2.0
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Namespace:
    scale: ClassVar[float] = 2.0


class Config:
    def __init__(self) -> None:
        self.power = 2.0


class Part(nn.Module):
    """It reads what it holds, what its children hold, and what is outside."""

    shift: ClassVar[float] = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8)
        self.rest = nn.ModuleList([nn.Dropout(0.2)])
        self.config, self.table = Config(), {"inner": {"factor": 1.0}}
        self.bends, self.factor = True, 3

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.factor + self.shift
        y = torch.sin(y) if self.bends else y
        y = y + 1 if self.drop.p > 0.6 else y
        y = y + 2 if self.rest[0].p > 0.6 else y
        y = y**self.config.power * self.table["inner"]["factor"]
        return self.norm(y) * Namespace.scale + OFFSET


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = Part(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x))


def set_at(path: str, name: str, value: Any) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        held: Any = model.get_submodule(path)
        setattr(held, name, value)

    return change


def set_config(model: nn.Module) -> None:
    model.get_submodule("part").config.power = 3.0  # type: ignore[union-attr]


def set_table(model: nn.Module) -> None:
    model.get_submodule("part").table["inner"]["factor"] = 5.0  # type: ignore[index]


HELD: dict[str, Callable[[nn.Module], None]] = {
    "flag": set_at("part", "bends", False),
    "number": set_at("part", "factor", 5),
    "an attribute that hides the class's": set_at("part", "shift", 5.0),
    "of a child that is not called": set_at("part.drop", "p", 0.9),
    "of a child in a list": set_at("part.rest.0", "p", 0.9),
    "of a child that is called": set_at("part.norm", "eps", 1.0),
    "of a configuration": set_config,
    "in a dictionary": set_table,
}
OUTSIDE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "of the class": lambda patch: patch.setattr(Part, "shift", 7.0),
    "global": lambda patch: patch.setitem(globals(), "OFFSET", 9.0),
    "namespace": lambda patch: patch.setattr(Namespace, "scale", 9.0),
}
PASSES = ("flatten_calls", "pack, flatten_calls")
_made: dict[str, tuple[nn.Module, nn.Module]] = {}


def made(passes: str) -> tuple[nn.Module, nn.Module]:
    """Return copies of a model and of what passes make of it."""
    if passes not in _made:
        torch.manual_seed(0)
        model = Model().eval()
        _made[passes] = model, fxopt.optimize(model, passes, example_inputs=X, measure=False)
    return copy.deepcopy(_made[passes])


def check(model: nn.Module, fast: nn.Module) -> None:
    """Compare some calls in a row: what the first one that misses changes must not let the old graph back in."""
    for grad in (True, False, False, True):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(fast(X), model(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("passes", PASSES)
def test_all_is_written_out(passes: str) -> None:
    model, fast = made(passes)
    assert not fxopt.graphs(fast)[""].find_nodes(op="call_module")
    check(model, fast)


@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("case", HELD)
def test_what_modules_hold(case: str, passes: str, switched: bool) -> None:
    model, fast = made(passes)
    check(model, fast)
    for each in (model, fast):
        HELD[case](each)
    if not switched:
        check(model, fast)
    for each in (model, fast):
        each.train()
        each.eval()
    check(model, fast)


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("case", OUTSIDE)
def test_what_is_outside(case: str, passes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fast = made(passes)
    check(model, fast)
    before = model(X)
    with monkeypatch.context() as patch:
        OUTSIDE[case](patch)
        check(model, fast)
        assert not torch.allclose(model(X), before)
    check(model, fast)


@pytest.mark.parametrize("passes", PASSES)
def test_copies_and_the_second_time(passes: str) -> None:
    model, fast = made(passes)
    for each in (model, fast):
        HELD["flag"](each)
    check(model, fast)
    check(model, copy.deepcopy(fast))
    again = fxopt.optimize(fast, passes, example_inputs=X, measure=False)
    check(model, again)
    for each in (model, fast, again):
        set_at("part", "bends", True)(each)
    check(model, fast)
    check(model, again)


def test_equal_numbers_of_other_types_are_other_values() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = 2

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    class Around(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return self[0](input) + 1

    x = torch.arange(4)
    fast = fxopt.optimize(Around(Whole()).eval(), "flatten_calls", example_inputs=x, measure=False)
    assert not fxopt.graphs(fast)[""].find_nodes(op="call_module")
    assert fast(x).dtype == torch.int64
    fast[0].factor = 2.0  # pyright: ignore[reportAttributeAccessIssue]
    assert fast(x).dtype == torch.float32

"""What forwards read from classes and modules of Python under other names, and what methods of objects outside read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.tracing.captured import capture_of
from fxopt.tracing.class_questions import asks_for_classes
from fxopt.tracing.outside_reads import OutsideReads

X = torch.linspace(-1, 1, 12).reshape(3, 4)
HERE = sys.modules[__name__]
SCALE: Any = 2.0
COUNT: Any = 0


class Inner:
    def scaled(self, x: Tensor) -> Tensor:
        return x * SCALE


class Settings:
    scale: Any = 2.0
    count: Any = 0
    flag: Any = True

    def __init__(self) -> None:
        self.inner = Inner()

    def scaled(self, x: Tensor) -> Tensor:
        return x * SCALE

    def __call__(self, x: Tensor) -> Tensor:
        return x * SCALE

    def deeper(self, x: Tensor) -> Tensor:
        return OTHER.by_object(x)

    def asks(self, module: nn.Module) -> bool:
        return type(module) is Block

    @property
    def doubled(self) -> float:
        return SCALE * 2

    @staticmethod
    def of_none(x: Tensor) -> Tensor:
        return x * SCALE

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x * cls.scale

    @classmethod
    def counted(cls, x: Tensor) -> Tensor:
        cls.count += 1
        return x + 1


class Derived(Settings):
    pass


class Other:
    def __init__(self) -> None:
        self.scale: Any = 2.0

    def by_object(self, x: Tensor) -> Tensor:
        return x * self.scale


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Holder(nn.Module):
    scale: Any = 2.0
    count: Any = 0

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x * cls.scale


SETTINGS, OTHER, EACH = Settings(), Other(), [Settings()]


@pytest.fixture(autouse=True)
def _as_at_start() -> Iterator[None]:
    yield
    globals().update(SCALE=2.0, COUNT=0)
    Settings.scale, Settings.count, Settings.flag, OTHER.scale, Holder.scale, Holder.count = 2.0, 0, True, 2.0, 2.0, 0
    for name in vars(Derived).keys() & {"scale", "count"}:
        delattr(Derived, name)


def change() -> None:
    globals().update(SCALE=9.0)
    Settings.scale = OTHER.scale = Holder.scale = 9.0


def _renamed_class(self: Any, x: Tensor) -> Tensor:
    settings = Settings
    return x * settings.scale


def _renamed_module(self: Any, x: Tensor) -> Tensor:
    here = HERE
    return x * here.SCALE


READS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "method": lambda self, x: SETTINGS.scaled(x),
    "call": lambda self, x: SETTINGS(x),
    "property": lambda self, x: x * SETTINGS.doubled,
    "method of an object in an object": lambda self, x: SETTINGS.inner.scaled(x),
    "method of an object in a list": lambda self, x: EACH[0].scaled(x),
    "object that a method names": lambda self, x: SETTINGS.deeper(x),
    "static method": lambda self, x: Settings.of_none(x),
    "class method": lambda self, x: Settings.of_class(x),
    "class method of a base": lambda self, x: Derived.of_class(x),
    "class method of an object": lambda self, x: SETTINGS.of_class(x),
    "class method of the module": lambda self, x: self.of_class(x),
    "class under another name": _renamed_class,
    "class under another name, walrus": lambda self, x: x * (settings := Settings).scale * settings.scale,
    "module of Python under another name": _renamed_module,
}


def model_of(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return type("Direct", (Holder,), {"forward": forward})()


@pytest.mark.parametrize("forward", READS.values(), ids=READS)
def test_what_is_read_is_guarded(forward: Any) -> None:
    model = model_of(forward)
    fast = fxopt.capture(model, (X,)).model
    before = model(X)
    assert capture_of(fast).variants and torch.equal(fast(X), before) and not capture_of(fast).misses
    change()
    for _ in range(3):
        assert torch.equal(fast(X), model(X))
    assert not torch.equal(before, model(X))


def _class_set(self: Any, x: Tensor) -> Tensor:
    settings = Settings
    settings.count += 1
    return x + 1


def _module_class_set(self: Any, x: Tensor) -> Tensor:
    holder = Holder
    holder.count += 1
    return x + 1


def _module_set(self: Any, x: Tensor) -> Tensor:
    here = HERE
    here.COUNT += 1
    return x + 1


def _handed_on(self: Any, x: Tensor) -> Tensor:
    _counts(Settings)
    return x + 1


def _counts(cls: Any) -> None:
    cls.count += 1


STORES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "class": _class_set,
    "class of modules": _module_class_set,
    "module of Python": _module_set,
    "class method": lambda self, x: Settings.counted(x),
    "class method of a derived class": lambda self, x: Derived.counted(x),
    "argument": _handed_on,
}


def counts() -> list[Any]:
    return [Settings.count, Derived.count, Holder.count, COUNT, "count" in vars(Derived)]


@pytest.mark.parametrize("forward", STORES.values(), ids=STORES)
def test_a_forward_that_changes_a_class_is_left_alone(forward: Any) -> None:
    program = fxopt.capture(model_of(forward), (X,))
    assert "not the module's" in program.opaque[""].reason
    before = sum(counts())
    program.model(X)
    assert sum(counts()) > before


@pytest.mark.parametrize("forward", STORES.values(), ids=STORES)
def test_what_a_trace_changed_is_put_back(forward: Any) -> None:
    module, before = model_of(forward), counts()
    reads = OutsideReads(module)
    assert not reads.put_back()
    with reads.watching():
        module(X)
    assert counts() != before
    assert "not the module's" in reads.put_back()
    assert counts() == before


def _sets_what_is_there(self: Any, x: Tensor) -> Tensor:
    settings = Settings
    settings.flag = True
    return x + 1


def test_what_is_there_already_is_set_again_where_it_is_not() -> None:
    fast = fxopt.capture(model_of(_sets_what_is_there), (X,)).model
    assert capture_of(fast).variants
    for _ in range(3):
        Settings.flag = False
        assert torch.equal(fast(X), X + 1)
        assert Settings.flag is True


def test_methods_of_objects_outside_may_ask_for_classes() -> None:
    assert asks_for_classes([model_of(lambda self, x: x if SETTINGS.asks(self.block) else -x)])
    assert not asks_for_classes([model_of(lambda self, x: SETTINGS.scaled(x))])

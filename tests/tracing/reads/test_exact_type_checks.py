"""What in the code of a forward may ask a module for its exact class, and what only looks like it."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt.tracing.reads import checks_exact_types


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1

    def described(self) -> str:
        return "a block" if type(self) is Block else "another"


class Settings:
    def copied(self) -> Any:
        return self if type(self) is not Settings else self.__class__()


KINDS = {list: 1, tuple: 2}
BLOCKS = {Block: 1}
PLAIN = (list, dict)
type_of = type


def _decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(self: Any, x: Tensor) -> Tensor:
        return function(self, x) if type(self.block) is Block else x

    return wrapper


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.settings = Settings()

    def _asking(self) -> bool:
        return type(self.block) is Block

    @property
    def _kind(self) -> type:
        return type(self.block)

    @staticmethod
    def _of(module: nn.Module) -> type:
        return type(module)


def _closing_over(ask: Any) -> Callable[[Any, Tensor], object]:
    return lambda self, x: ask(self.block) is Block


ASKING: list[Callable[[Any, Tensor], object]] = [
    lambda self, x: type(self.block) is Block,
    lambda self, x: Block == type(self.block),  # noqa: E721
    lambda self, x: type(self.block) in (list, Block),
    lambda self, x: type(self.block) in BLOCKS,
    lambda self, x: BLOCKS[type(self.block)],
    lambda self, x: BLOCKS.get(type(self.block)),
    lambda self, x: isinstance(x, type(self.block)),
    lambda self, x: (type(self.block) if x is None else type(self)) is Block,
    lambda self, x: (type(self.block) if x is None else list) is Block,
    lambda self, x: (kind := type(self.block)) is list or kind is Block,
    lambda self, x: self.block.__class__ is Block,
    lambda self, x: {type(m) for m in self.children()},
    lambda self, x: list(map(type, self.children())),
    lambda self, x: type(self.block).__mro__,
    lambda self, x: type(self.block) == type(self),  # noqa: E721
    lambda self, x: type_of(self.block) is Block,
    lambda self, x: self._asking(),
    lambda self, x: self._kind,
    lambda self, x: self._of(self.block),
    lambda self, x: self.block.described(),
    lambda self, x: (lambda module: type(module))(self.block),  # noqa: PLC3002
    _decorated(lambda self, x: x),
    _closing_over(type),
    lambda self, x: builtins.type(self.block) is Block,
]
QUIET: list[Callable[[Any, Tensor], object]] = [
    lambda self, x: self.block(x),
    _closing_over(id),
    lambda self, x: builtins.len(self.children()),
    lambda self, x: x.type(torch.float64),
    lambda self, x: x.device.type,
    lambda self, x: isinstance(self.block, Block),
    lambda self, x: isinstance(self.block, type),
    lambda self, x: isinstance(self.block, (str, type)),
    lambda self, x: type(self.block).__name__ == "Block",
    lambda self, x: f"a {type(self.block)} {self.block.__class__.__name__}",
    lambda self, x: str(type(self.block)),
    lambda self, x: type(self.block).weight,
    lambda self, x: type(self.block)(),
    lambda self, x: issubclass(type(self.block), Block),
    lambda self, x: type(x) is Tensor,
    lambda self, x: type(x) in (list, tuple),
    lambda self, x: type(x) in PLAIN,
    lambda self, x: KINDS[type(x)],
    lambda self, x: type(x) is str,
    lambda self, x: x.shape[0] if self.training else type(self).__name__,
    lambda self, x: x is None,
    lambda self, x: self.settings.copied(),
]


def holder(forward: Callable[[Any, Tensor], object]) -> nn.Module:
    return type("Holding", (Holder,), {"forward": forward})()


@pytest.mark.parametrize("forward", ASKING)
def test_what_asks(forward: Callable[[Any, Tensor], object]) -> None:
    assert checks_exact_types([holder(forward)]).startswith(f"{Path(__file__).name}:")


@pytest.mark.parametrize("forward", QUIET)
def test_what_does_not(forward: Callable[[Any, Tensor], object]) -> None:
    assert not checks_exact_types([holder(forward)])


def test_other_functions_of_that_name() -> None:
    names: dict[str, Any] = {"type": lambda value: "this"}
    exec("def forward(self, x):\n    return type(self.block)", names)
    assert not checks_exact_types([holder(names["forward"])])
    exec("def forward(self, x, type=str):\n    return type(self.block)", names)
    assert not checks_exact_types([holder(names["forward"])])


class Quiet(Holder):
    def forward(self, x: Tensor) -> Tensor:
        if x is None:
            raise TypeError("no tensor for", type(self.block))
        assert self.block, f"{type(self.block)}"
        return self.block(x)


class Loud(Quiet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if type(self.block) is Block else x


class Under(Loud):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_errors_and_forwards_of_base_classes() -> None:
    assert not checks_exact_types([Quiet()])
    assert checks_exact_types([Loud()]) and checks_exact_types([Under()])
    assert not checks_exact_types([nn.Sequential(Loud())])
    assert checks_exact_types([nn.Sequential(Loud()), Loud()])


def test_what_runs_around_a_forward() -> None:
    module = Quiet()
    assert not checks_exact_types([module])
    module.register_forward_pre_hook(lambda module, args: print(type(module) is Loud))
    assert checks_exact_types([module])

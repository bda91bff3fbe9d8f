"""Models on the meta device, verified in a small twin with data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt import Edit, Goal, Pass, Program, Refusal, Site, operation
from fxopt.errors import UsageError


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x - torch.tanh(self.inner(x))


class Stack(nn.Module):
    def __init__(self, depth: int, width: int = 8, wide: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.wide = wide

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * 2 if self.wide else x


@dataclasses.dataclass(frozen=True)
class Rewrite(Pass):
    """Write subtractions as calls, and doubling as an addition.

    Attributes:
        wrong: swap the operands of the subtractions.
    """

    wrong: bool = False

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for name in ("sub", "mul"):
            for match in program.matches(operation(name, name="node")):
                yield match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = site["node"]
        one, other = node.args
        if other == 2:
            edit.replace(node, edit.call(torch.add, one, one))
        else:
            edit.replace(node, edit.call(torch.sub, *((other, one) if self.wrong else (one, other))))


def on_meta(**options: bool) -> Stack:
    with torch.device("meta"):
        return Stack(4, 64, **options)


def decided(model: nn.Module) -> list[tuple[str, str, str, str]]:
    return [(d.key, d.status, d.figures.get("checked", ""), d.reason) for d in fxopt.plan(model).decisions]


X = torch.randn(3, 8)


def test_without_a_twin_nothing_is_verified() -> None:
    fast = fxopt.optimize(on_meta(), Rewrite(), example_inputs=torch.randn(3, 64))
    assert {checked for _, _, checked, _ in decided(fast)} == {"unverified: meta"}


class Sized(Stack):
    """One that takes inputs of one size, whatever its own."""

    def __init__(self, depth: int, width: int = 8, wide: bool = False) -> None:
        super().__init__(depth, width, wide)
        self.into = nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.into(x))


def sized(**options: bool) -> Sized:
    with torch.device("meta"):
        return Sized(4, 64, **options)


def test_what_the_twin_verified_is_verified_in_layers_that_it_has_not() -> None:
    fast = fxopt.optimize(sized(), Rewrite(), example_inputs=X, verify_twin=Sized(2))
    found = decided(fast)
    assert [key for key, *_ in found] == [f"blocks.{number}:sub" for number in range(4)]
    assert {each[1:] for each in found} == {("applied", "float64, in the twin", "")}
    assert next(fast.parameters()).is_meta and "in the twin" in str(fxopt.report(fast))


def test_what_is_wrong_in_the_twin_is_undone() -> None:
    fast = fxopt.optimize(sized(), Rewrite(wrong=True), example_inputs=X, verify_twin=Sized(2))
    for number, (_, status, _, reason) in enumerate(decided(fast)):
        assert status == "undone" and reason.startswith("in the twin, at blocks.") and "output differs" in reason
        assert number > 1 or f"blocks.{number}: " in reason
    assert "torch.sub" not in str(fxopt.graphs(fast)["blocks.3"])


def test_of_what_the_twin_has_not_nothing_is_known() -> None:
    fast = fxopt.optimize(sized(wide=True), Rewrite(), example_inputs=X, verify_twin=Sized(2))
    checked = {key: checked for key, _, checked, _ in decided(fast)}
    assert checked["(root):mul"] == "unverified: meta" and checked["blocks.0:sub"] == "float64, in the twin"


@pytest.mark.parametrize(
    ("model", "twin", "words"),
    [
        (Sized(2), Sized(2), "this one has data, and is verified itself"),
        (sized(), sized(), "is on the meta device itself; give a small model with data"),
        (sized(), Stack(2), "is a Stack, the model a Sized; build both from one class"),
        (sized(), 3, "expected a torch.nn.Module, got int"),
    ],
    ids=["no meta model", "twin on meta", "another class", "no module"],
)
def test_twins_that_say_nothing(model: nn.Module, twin: nn.Module, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        fxopt.optimize(model, Rewrite(), example_inputs=X, verify_twin=twin)

"""What a rewrite of a whole model is compared on, where its forward takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt import Edit, Numerics, Pass, Phase, Program, Site, anything, operation
from fxopt.passes.driver import comparison

ROWS, LENGTH = 24, 24


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.relu(self.one(x)))


def on_longer(x: Tensor) -> Tensor:
    return torch.relu(x) * (1.1 if x.shape[1] > LENGTH else 1.0)


def behind_its_length(x: Tensor) -> Tensor:
    return torch.cat([torch.relu(x[:, :LENGTH]), torch.relu(x[:, LENGTH:]) * 1.01], 1)


def on_many_rows(x: Tensor) -> Tensor:
    return torch.relu(x) * (1.1 if x.shape[0] > 4 * ROWS else 1.0)


def never(x: Tensor) -> Tensor:
    return torch.relu(x) * 1.0


@dataclass(frozen=True)
class Replace(Pass):
    """Put a function in the place of relu.

    Before: relu(x)        After: function(x)
    Refuses: nothing.
    """

    numerics: ClassVar[Numerics] = Numerics.EXACT
    goal: ClassVar[fxopt.Goal] = fxopt.Goal.SIZE
    phase: ClassVar[Phase] = Phase.EVAL
    function: Callable[[Tensor], Tensor] = never

    def find(self, program: Program) -> Iterator[Site]:
        for match in program.matches(operation("relu", anything(name="x"), name="result")):
            yield match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = site["result"]
        edit.replace(node, edit.call(self.function, *node.args, before=node))


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("function", [on_longer, behind_its_length, on_many_rows, never])
def test_what_errs_only_on_more_or_longer_rows_is_found_in_a_slow_model_too(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[Tensor], Tensor], slow: bool
) -> None:
    monkeypatch.setattr(comparison, "_COMPARED_SMALLER_FROM", 0.0 if slow else 1e9)
    model, x = Net().eval().requires_grad_(False), torch.randn(ROWS, LENGTH, 8)
    (decision,) = fxopt.plan(fxopt.optimize(model, Replace(function), example_inputs=x, measure=False)).decisions
    assert decision.status == ("applied" if function is never else "undone")
    assert ("bitwise" in decision.reason) is (slow and function is not never)

"""A module with several graphs is verified on calls of each, however the calls of one lie between those of another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.passes.contract import Pass
from fxopt.passes.rewriting import Edit, operation
from fxopt.passes.sites import Goal, Site
from fxopt.passes.verification import Data, reference
from fxopt.tracing.examples import Inputs


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return torch.cos(x)
        return torch.dropout(torch.sin(x).float(), 0.5, train=True) * mask


@dataclasses.dataclass(frozen=True)
class Sine(Pass):
    """Write the sine as another function."""

    function: str = "cos"

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: fxopt.Program) -> Iterator[Site]:
        for match in operation("sin", name="sin").find(program):
            yield match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("sin")
        edit.replace(node, edit.call(getattr(torch, self.function), node.args[0], before=node))


X = torch.linspace(0.1, 1.0, 4)
ONE, OTHER = (X,), (X, torch.ones(4))


def decided(pass_: Pass, calls: list[Any]) -> str:
    fast = fxopt.optimize(Masked(), pass_, example_inputs=calls)
    (decision,) = fxopt.plan(fast).decisions
    return decision.status


@pytest.mark.parametrize("order", ["ababa", "abaaaaaa", "aaaba", "baaaa", "bbbba"])
def test_a_rewrite_of_any_graph_is_checked(order: str) -> None:
    calls = [ONE if letter == "a" else OTHER for letter in order]
    assert decided(Sine("cos"), calls) == "undone"
    assert decided(Sine("sin"), calls) == "applied"


def test_noise_reaches_every_graph() -> None:
    dull = (torch.zeros(4), torch.ones(4))
    assert decided(Sine("tan"), [ONE, ONE, dull, ONE, ONE]) == "undone"


def test_few_calls_are_run_and_one_of_each_graph() -> None:
    calls = [Inputs(*(ONE if number % 2 == 0 else OTHER)) for number in range(9)]
    module = fxopt.capture(Masked(), calls).model
    samples = reference(module, calls).samples
    recorded = [len(sample.arguments[0]) for sample in samples if sample.data is Data.RECORDED]
    assert recorded == [1, 2, 1]
    assert [len(sample.arguments[0]) for sample in samples if sample.data is Data.NOISY] == [1, 2]

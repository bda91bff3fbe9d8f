"""Passes that say what the rewritten model must be equal to are compared once for all their sites."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from support.runs import manager_of
from torch import Tensor, nn

import fxopt
from fxopt.errors import BudgetError
from fxopt.passes.contract import Pass
from fxopt.passes.driver import Manager
from fxopt.passes.rewriting import Edit
from fxopt.passes.sites import Goal, Numerics, OwnForward, Refusal, Site
from fxopt.passes.timing import TimeBudget
from fxopt.passes.verification import References
from fxopt.runtime.state import Select
from fxopt.tracing.program import Program


class Pair(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(4, width), nn.Linear(width, 4), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.drop(torch.relu(self.first(x))))


@dataclasses.dataclass(frozen=True)
class Halve(Pass):
    """Remove the last half of the hidden units of each pair, wrongly so in some."""

    wrong: tuple[str, ...] = ()

    numerics: ClassVar[Numerics] = Numerics.SEMANTIC
    goal: ClassVar[Goal] = Goal.SIZE
    own_forward: ClassVar[OwnForward | None] = OwnForward.RIGHT

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for name, module in program.model.named_modules():
            if isinstance(module, Pair):
                parts = (Site(program, f"{name}.{child}", {}) for child in ("first", "second"))
                kept = [0, 1, 2, 3] if name not in self.wrong else [1, 2, 3, 4]
                yield Site.over(program, *parts, data={"kept": kept}, label=name)

    def rewrite(self, site: Site, edit: Edit) -> None:
        for name, dim in (("first.weight", 0), ("first.bias", 0), ("second.weight", 1)):
            step = Select(name, name, dim, tuple(site.data["kept"]), 8)
            edit.set_tensor(name, *step.forward([edit.owner.get_parameter(name)]), step)

    def reference(self, site: Site, original: nn.Module) -> nn.Module:
        with torch.no_grad():
            original.first.weight[4:], original.first.bias[4:] = 0, 0
            original.second.weight[:, 4:] = 0
        return original


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def pairs(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Pair() for _ in range(count)))


@pytest.mark.parametrize("training", [True, False])
def test_all_sites_are_compared_at_once_with_dropout_of_another_shape(training: bool):
    fast = fxopt.optimize(pairs(5).train(training), Halve(), example_inputs=(X,))
    decisions = fxopt.plan(fast).decisions
    assert [decision.status for decision in decisions] == ["applied"] * 5
    assert {decision.figures["checked_together"] for decision in decisions} == {5}
    assert {decision.figures["checked"] for decision in decisions} == {"float64"}


def test_what_is_wrong_is_found_by_halving():
    fast = fxopt.optimize(pairs(5), Halve(wrong=("1", "4")), example_inputs=(X,))
    decisions = {decision.label: decision for decision in fxopt.plan(fast).decisions}
    assert {label: d.status for label, d in decisions.items()} == {
        "0": "applied", "1": "undone", "2": "applied", "3": "applied", "4": "undone",
    }  # fmt: skip
    assert "does not have the values of the original tensors" in decisions["1"].reason
    assert fast[1].first.weight.shape == (8, 4) and fast[2].first.weight.shape == (4, 4)


def test_a_single_site_is_compared_too():
    fast = fxopt.optimize(pairs(1).train(), Halve(), example_inputs=(X,))
    (decision,) = fxopt.plan(fast).decisions
    assert decision.status == "applied" and decision.figures["checked"] == "float64"
    fast = fxopt.optimize(pairs(1).train(), Halve(wrong=("0",)), example_inputs=(X,))
    assert [decision.status for decision in fxopt.plan(fast).decisions] == ["undone"]


def test_no_time_is_too_short_for_one_comparison():
    fast = fxopt.optimize(pairs(5), Halve(), example_inputs=(X,), time_budget=0)
    assert {decision.status for decision in fxopt.plan(fast).decisions} == {"applied"}


def test_tied_tensors_make_the_round_trip():
    model = pairs(3)
    model[2].first.weight = model[0].first.weight
    one = Halve()
    fast = fxopt.optimize(model, one, example_inputs=(X,))
    assert "applied" in {decision.status for decision in fxopt.plan(fast).decisions}
    assert fast[1].first.weight.shape == (4, 4)


def test_batch_norms_in_training_are_rewritten_too():
    class Normed(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    model = nn.Sequential(Normed(), Normed()).train()
    fast = fxopt.optimize(model, Halve(), example_inputs=(X,))
    assert {decision.status for decision in fxopt.plan(fast).decisions} == {"applied"}


def ended(wrong: tuple[str, ...], budget: float = 6.0) -> Manager:
    """Halve pairs of which some are wrong; the time for it ends on the way."""
    ticks = itertools.count()
    manager = manager_of(
        fxopt.capture(pairs(8).eval(), (X,)), budget=TimeBudget(budget, clock=lambda: float(next(ticks)))
    )
    manager.run([Halve(wrong=wrong)])
    return manager


@pytest.mark.parametrize("wrong", [("2",), ("0", "5", "6"), tuple(map(str, range(8)))])
def test_where_time_ends_what_is_wrong_is_found_briefly_and_the_rest_is_compared_in_full(wrong: tuple[str, ...]):
    decisions = {decision.label: decision for decision in ended(wrong).decisions}
    assert {label for label, each in decisions.items() if each.status == "undone"} == set(wrong)
    right = [each for label, each in decisions.items() if label not in wrong]
    assert {(each.status, each.figures["checked"]) for each in right} <= {("applied", "float64")}


def test_where_only_the_full_comparison_objects_and_time_ends_it_raises(monkeypatch: pytest.MonkeyPatch):
    real = References.taken
    monkeypatch.setattr(  # briefly nothing is compared
        References, "taken",
        lambda module, calls, modes, **how: real(module, calls if how["widest"] is torch.float64 else (), modes, **how),
    )  # fmt: skip
    with pytest.raises(BudgetError, match=r"pass 'halve': .*was spent before it was known at which of 4 places"):
        ended(("2",), budget=0.0)

"""What is left to the whole model stands only where each of its modes was compared in time, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from support.runs import manager_of
from support.wrong_passes.modes import DROPPED, Layer, dropped
from support.wrong_passes.subject import Replace, named
from torch import Tensor

import fxopt
from fxopt.passes.rewriting import Edit
from fxopt.passes.sites import Cause, Goal, Site
from fxopt.passes.timing import TimeBudget

BUDGETS = [200, 400, 600, 800, 1000, 1300, 1600, 2000, 2500, 3000, 4000, 6000]
"""In readings of the clock: the first end in the first mode that is compared, the last are enough for all."""


class Ticks:
    """A clock that goes on whenever it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


class Fast(Replace):
    """The same for speed: it is left to the whole model where time is over."""

    goal: ClassVar[Goal] = Goal.SPEED


def twice_in(mode: bool) -> Callable[..., Tensor]:
    """Return a dropout whose gradient is twice what it should be in a mode."""

    def dropout(x: Tensor, p: float, training: bool, **_: bool) -> Tensor:
        y = dropped(x, p, training)
        return y * 2 - y.detach() if bool(training) is mode else y

    return dropout


def decided(function: Callable[..., Any], budget: float, *, training: bool) -> tuple[str, str]:
    """Return what becomes of a rewrite for which there was no check, and why."""
    model, inputs = DROPPED.example()
    program = fxopt.capture(model.train(training), inputs)
    clock = TimeBudget(budget, budget / 100, spent=0.78 * budget, clock=Ticks())
    manager = manager_of(program, budget=clock, time=False)
    manager.run([Fast(function, (), "dropout")])
    assert {each.figures["checked"] for each in manager.decisions} == {"with the whole model"}
    manager.compare(model)
    (outcome,) = {(each.status, each.cause) for each in manager.decisions}
    return outcome


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("wrong_in", [True, False])
def test_no_gradient_that_is_wrong_in_one_mode_stands_wherever_time_ends(training: bool, wrong_in: bool) -> None:
    found = [decided(twice_in(wrong_in), budget, training=training) for budget in BUDGETS]
    assert {status for status, _ in found} == {"undone"}
    assert found[-1][1] != Cause.NOT_CHECKED


@pytest.mark.parametrize("training", [True, False])
def test_what_is_right_stands_where_time_is_enough_and_goes_unchecked_where_it_is_not(training: bool) -> None:
    found = [decided(dropped, budget, training=training) for budget in BUDGETS]
    assert found[0] == ("undone", Cause.NOT_CHECKED)
    assert found[-1] == ("applied", "")


class ReadsMode(Replace):
    """Give a function the mode of the module, which does not ask for it itself."""

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("node")
        node.target = named(self.function)
        with edit.graph.inserting_before(node):
            node.args = (*node.args, edit.graph.get_attr("training"))


def off_in(mode: bool) -> Callable[..., Tensor]:
    """Return a ReLU that is off in a mode by a little."""
    return lambda x, training: torch.relu(x) * (1.001 if training is mode else 1.0)


def cut_in(mode: bool) -> Callable[..., Tensor]:
    """Return a ReLU without gradients in a mode."""
    return lambda x, training: torch.relu(x).detach() if training is mode else torch.relu(x)


@pytest.mark.parametrize("wrong", [off_in, cut_in])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("wrong_in", [True, False])
def test_a_mode_that_the_rewritten_module_alone_reads_is_compared(
    wrong: Callable[[bool], Callable[..., Tensor]], training: bool, wrong_in: bool
) -> None:
    fast = fxopt.optimize(
        Layer().train(training), [ReadsMode(wrong(wrong_in), (), "relu")], example_inputs=torch.randn(4, 6)
    )
    assert [(each.status, each.cause) for each in fxopt.plan(fast).decisions] == [("undone", Cause.DIFFERS)]

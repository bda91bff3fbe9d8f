"""Where time ends in the middle of a check or a comparison: by a clock that an operator of the model moves on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from support.runs import manager_of
from torch import Tensor, nn

import fxopt
from fxopt.passes.contract import Pass
from fxopt.passes.driver import Manager
from fxopt.passes.rewriting import Edit, operation
from fxopt.passes.sites import Goal, Numerics, Phase, Site
from fxopt.passes.timing import TimeBudget
from fxopt.tracing.program import Program

X = torch.rand(16, 32, generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass
class Machine:
    """Knows what time it is, what the slow operator takes for each type, and what that was given."""

    now: float = 0.0
    takes: dict[torch.dtype, float] = dataclasses.field(default_factory=dict[torch.dtype, float])
    seen: list[tuple[torch.dtype, int]] = dataclasses.field(default_factory=list[tuple[torch.dtype, int]])

    def __call__(self) -> float:
        return self.now


MACHINE = Machine()


@torch.library.custom_op("fxopt_tests::in_python", mutates_args=())
def in_python(x: Tensor) -> Tensor:
    MACHINE.now += MACHINE.takes.get(x.dtype, 0.0)
    MACHINE.seen.append((x.dtype, len(x)))
    return x.clone()


in_python.register_fake(torch.empty_like)
in_python.register_autograd(lambda _, gradient: gradient)


@pytest.fixture
def machine() -> Iterator[Machine]:
    MACHINE.now, MACHINE.takes = 0.0, {}
    MACHINE.seen.clear()
    yield MACHINE
    MACHINE.takes = {}


class Steep(nn.Module):
    """Makes a thousandth of what rounding leaves of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.fxopt_tests.in_python(torch.sin(x * 1e4))


class Gentle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.fxopt_tests.in_python(x * 4.0)


@dataclasses.dataclass(frozen=True)
class InTwoSteps(Pass):
    """Multiply twice by the root of a factor; judged by the whole model alone."""

    goal: ClassVar[Goal] = Goal.SPEED
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    phase: ClassVar[Phase] = Phase.EVAL
    judged: bool = True
    choices: tuple[str, ...] = ()
    writing: float = 0.0

    def find(self, program: Program) -> Iterator[Site]:
        for match in program.matches(operation("mul", name="mul")):
            yield dataclasses.replace(match.site(), choices=self.choices)

    def judges(self, site: Site) -> bool:
        return self.judged

    def rewrite(self, site: Site, edit: Edit) -> None:
        MACHINE.now += self.writing
        node = edit.graph_node("mul")
        x, factor = node.args
        root = math.sqrt(factor)
        edit.replace(node, edit.call(torch.mul, edit.call(torch.mul, x, root, before=node), root, before=node))


class Engine(InTwoSteps):
    """The same, and never left because time is up."""

    @property
    def skippable(self) -> bool:
        return False


class Owed(InTwoSteps):
    """The same, for another purpose."""

    goal: ClassVar[Goal] = Goal.SIZE


def managed(machine: Machine, budget: TimeBudget, pass_: Pass, model: nn.Module, *, time: bool = False) -> Manager:
    """Run one pass within a budget that begins now, and compare; `machine` tells what only that took."""
    original = model.eval()
    program = fxopt.capture(original, (X,))
    machine.seen.clear()
    manager = manager_of(program, budget=budget.counting_from(machine.now), time=time)
    manager.run([pass_])
    manager.compare(original)
    return manager


def outcomes(manager: Manager) -> list[tuple[str, str]]:
    return [(decision.status, decision.cause) for decision in manager.decisions]


def limited(seconds: float, forward: float = 1.0) -> TimeBudget:
    return TimeBudget(seconds, forward, clock=MACHINE)


def test_with_time_the_model_is_compared_as_usual(machine: Machine) -> None:
    machine.takes = {torch.float32: 1.0, torch.float64: 1.0}
    manager = managed(machine, limited(1e6), InTwoSteps(), Steep())
    assert outcomes(manager) == [("applied", "")]
    assert not manager.context.budget.concessions
    assert (torch.float64, len(X)) in machine.seen
    assert max(rows for _, rows in machine.seen) > len(X)


def test_where_float64_takes_too_long_the_model_is_compared_in_its_own_types(machine: Machine) -> None:
    machine.takes = {torch.float32: 0.1, torch.float64: 1000.0}
    manager = managed(machine, limited(100.0), InTwoSteps(), Steep())
    assert outcomes(manager) == [("applied", "")]
    assert list(manager.context.budget.concessions) == [
        "the whole model was compared in its own types alone, on a smaller call"
    ]


def test_where_the_usual_calls_take_too_long_the_model_is_compared_on_fewer_rows(machine: Machine) -> None:
    machine.takes = {torch.float32: 1.0}
    budget = limited(6.0, forward=1.5)  # eight calls take 12 s
    manager = managed(machine, budget, InTwoSteps(), Gentle())
    assert outcomes(manager) == [("applied", "")]
    assert list(budget.concessions) == ["the whole model was compared on a smaller call alone"]
    assert max(rows for _, rows in machine.seen) < len(X)


def test_what_nothing_shows_to_be_right_is_undone(machine: Machine) -> None:
    machine.takes = {torch.float32: 50.0, torch.float64: 50.0}
    manager = managed(machine, limited(100.0), InTwoSteps(), Steep())
    assert outcomes(manager) == [("undone", "budget.not_checked")]
    assert torch.equal(manager.program.model(X), Steep()(X))


def test_what_was_asked_for_is_compared_however_long_it_takes(machine: Machine) -> None:
    machine.takes = {torch.float32: 50.0, torch.float64: 50.0}
    manager = managed(machine, limited(100.0), Owed(), Steep())
    assert outcomes(manager) == [("applied", "")]
    assert manager.context.budget.spent > 100.0


def test_a_check_ends_where_time_does(machine: Machine) -> None:
    machine.takes = {torch.float32: 1.0, torch.float64: 30.0}
    budget = limited(100.0)
    manager = managed(machine, budget, InTwoSteps(judged=False), Gentle())
    assert outcomes(manager) == [("undone", "budget.not_checked")]  # nor did the whole model's check fit
    assert [rows for kind, rows in machine.seen if kind is torch.float64] == [8, 8, 3, 8, 8]
    assert "mul_1" not in str(manager.program.graph(""))


def test_what_an_engine_would_gain_is_left_to_the_comparison_of_the_whole(machine: Machine) -> None:
    machine.takes = {torch.float32: 0.1, torch.float64: 30.0}
    manager = managed(machine, limited(100.0), Engine(judged=False), Gentle())
    assert [(d.status, d.figures["checked"]) for d in manager.decisions] == [("applied", "with the whole model")]


@pytest.mark.parametrize(("seconds", "written"), [(1000.0, ["one", "two"]), (50.0, ["one"])])
def test_another_lowering_is_written_where_time_is_left_for_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, seconds: float, written: list[str]
) -> None:
    raced: list[list[str]] = []

    def timed(candidates: Any, **_: Any) -> fxopt.passes.timing.Timings:
        raced.append([name for name in candidates if name != "before"])
        return fxopt.passes.timing.Timings([{name: 2.0 if name == "before" else 1.0 for name in candidates}] * 9)

    monkeypatch.setattr(fxopt.passes.timing, "time_candidates", timed)
    budget = limited(seconds, forward=1e-3)
    manager = managed(machine, budget, Engine(judged=False, choices=("one", "two"), writing=30.0), Gentle(), time=True)
    assert raced[0] == written
    assert outcomes(manager) == [("applied", "")]


@pytest.mark.parametrize(("spent", "said"), [(1.0, ""), (9.0, "4 s more than the time budget: finding sites took 9 s")])
def test_the_report_says_by_how_much_the_budget_was_exceeded_and_what_took_the_longest(
    monkeypatch: pytest.MonkeyPatch, spent: float, said: str
) -> None:
    class Searching(InTwoSteps):
        def find(self, program: Program) -> Iterator[Site]:
            MACHINE.now += spent
            return super().find(program)

    monkeypatch.setattr("fxopt.passes.driver.run.budget_clock", lambda: MACHINE)
    fast = fxopt.optimize(Gentle().eval(), Searching(), example_inputs=(X,), time_budget=5)
    figures = fxopt.report(fast).to_json()["spent"]
    assert figures["stages"]["finding sites"] == spent
    assert (said in str(fxopt.report(fast))) and (
        bool(said) == ("more than the time budget" in str(fxopt.report(fast)))
    )

"""Where time is up, documented rules decide: nothing unchecked is applied, and what nobody timed goes first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from support.runs import manager_of
from support.subtractions import Subtractions
from torch import Tensor, nn

import fxopt
from fxopt.errors import UsageError
from fxopt.passes import timing
from fxopt.passes.contract import Pass
from fxopt.passes.driver import Manager
from fxopt.passes.rewriting import Edit, operation
from fxopt.passes.sites import Goal, Numerics, Phase, Site
from fxopt.passes.timing import TimeBudget, Timings
from fxopt.tracing.program import Program, capture_program

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.weight.sum(0)


def net(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(Block(1 + number) for number in range(count))).eval()


@dataclasses.dataclass(frozen=True)
class Subtract(Subtractions):
    """Write `a - b` as a call of torch.sub."""

    goal: ClassVar[Goal] = Goal.SPEED
    numerics: ClassVar[Numerics] = Numerics.EXACT
    choices: tuple[str, ...] = ()
    required: bool = False

    def find(self, program: Program) -> Iterator[Site]:
        for match in program.matches(operation("sub", name="sub")):
            yield dataclasses.replace(match.site(), choices=self.choices, required=self.required)


@dataclasses.dataclass(frozen=True)
class Tidy(Subtract):
    """The same as a clean-up."""

    goal: ClassVar[Goal] = Goal.SIZE
    clean_up: ClassVar[bool] = True


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Note what is timed; what is rewritten is always twice as fast."""
    seen: list[list[str]] = []

    def timed(candidates: Any, **_: Any) -> Timings:
        seen.append(sorted(candidates))
        return Timings([{name: 2.0 if name == "before" else 1.0 for name in candidates}] * 9)

    monkeypatch.setattr(timing, "time_candidates", timed)
    return seen


def managed(budget: TimeBudget, *passes: Pass, model: nn.Module | None = None) -> Manager:
    manager = manager_of(fxopt.capture(model or net(), (X,)), budget=budget)
    manager.run(passes)
    return manager


def outcomes(manager: Manager) -> list[tuple[str, str]]:
    return [(decision.status, decision.reason) for decision in manager.decisions]


def test_what_could_not_be_checked_is_not_applied(races: list[list[str]]) -> None:
    manager = managed(TimeBudget(5.0, spent=5.0), Subtract(), Tidy())
    reason = "not checked: the time budget of 5 s was spent; allow more by time_budget"
    assert [(d.step, d.label, d.status, d.reason) for d in manager.decisions] == [
        (step, "(root)", "skipped", reason) for step in (0, 1)
    ]
    assert not races
    assert torch.equal(manager.program.model(X), net()(X))


def test_clean_ups_leave_time_to_the_others(races: list[list[str]]) -> None:
    manager = managed(TimeBudget(100.0, spent=70.0), Tidy(), Subtract())
    assert [status for status, _ in outcomes(manager)] == ["skipped", *["applied"] * 3]


@dataclasses.dataclass(frozen=True)
class Slow(Subtract):
    """The same for another purpose, with a check that takes ten times the budget."""

    goal: ClassVar[Goal] = Goal.SIZE
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    budget_of: Any = dataclasses.field(default=None, compare=False)

    def rewrite(self, site: Site, edit: Edit) -> None:
        super().rewrite(site, edit)
        self.budget_of.spent += 10 * self.budget_of.seconds


def test_a_pass_that_takes_all_the_time_leaves_those_behind_their_part(races: list[list[str]]) -> None:
    class Lossy(Subtract):
        numerics: ClassVar[Numerics] = Numerics.APPROXIMATE

    budget = TimeBudget(100.0)
    manager = managed(budget, Slow(budget_of=budget), Lossy())
    assert [(d.step, d.status) for d in manager.decisions] == [(step, "applied") for step in (0, 0, 0, 1, 1, 1)]
    hurried = "its part of the time budget of 100 s was spent: only results of one call, in evaluation, were compared"
    assert [d.figures.get("hurried") for d in manager.decisions] == [None, hurried, hurried, None, None, None]
    assert len(races) == 3 + 1 + 1  # three sites and the whole model, this on a smaller batch, too


class Wrong(Slow):
    """The same, and wrong in blocks with more rows than one."""

    def rewrite(self, site: Site, edit: Edit) -> None:
        super().rewrite(site, edit)
        if len(edit.owner.weight) > 1:
            edit.replace(edit.graph_node("sub"), edit.call(torch.add, *edit.graph_node("sub").args))


def test_what_is_named_for_more_than_speed_is_checked_briefly_where_no_time_is_left(races: list[list[str]]) -> None:
    budget = TimeBudget(5.0, spent=5.0)
    manager = managed(budget, Wrong(budget_of=budget), Subtract())
    assert [(d.step, d.status) for d in manager.decisions] == [
        (0, "applied"), (0, "undone"), (0, "undone"), (1, "skipped"),
    ]  # fmt: skip
    assert manager.decisions[0].figures["checked"] == "float32 on one call"
    assert torch.equal(manager.program.model(X), net()(X))


def test_without_time_for_timing_one_lowering_is_applied_and_the_whole_model_judges(races: list[list[str]]) -> None:
    manager = managed(TimeBudget(100.0, timing=80.0), Subtract())
    assert outcomes(manager) == [("applied", "")] * 3
    assert {d.figures["untimed"] for d in manager.decisions} == {
        "its share of the time budget of 100 s is too short to tell; give a larger time_budget"
    }
    assert races == [["after", "before"]] * 2  # on a smaller batch, too


@pytest.mark.parametrize("required", [False, True])
def test_without_time_for_timing_the_first_lowering_is_applied(races: list[list[str]], required: bool) -> None:
    manager = managed(TimeBudget(100.0, timing=80.0), Subtract(choices=("one", "two"), required=required))
    assert [(d.status, d.choice) for d in manager.decisions] == [("applied", "one")] * 3
    assert all(race == ["after", "before"] for race in races)


def test_what_nobody_timed_is_taken_back_where_all_of_it_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(candidates: Any, **_: Any) -> Timings:
        return Timings([{name: 1.0 if name == "before" else 2.0 for name in candidates}] * 9)

    monkeypatch.setattr(timing, "time_candidates", timed)
    manager = managed(TimeBudget(100.0, timing=80.0), Subtract())
    assert outcomes(manager) == [("undone", "the whole model was slower with it (0.5x)")] * 3


def test_one_slow_reading_of_the_whole_model_takes_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = iter([1.0, 3.0])

    def timed(candidates: Any, **_: Any) -> Timings:
        return Timings([{name: next(before) if name == "before" else 2.0 for name in sorted(candidates)[::-1]}] * 9)

    monkeypatch.setattr(timing, "time_candidates", timed)
    manager = managed(TimeBudget(100.0, timing=80.0), Subtract())
    assert outcomes(manager) == [("applied", "")] * 3
    assert manager.timings is not None
    assert manager.timings["speedup"] == 1.0  # of both races, half of the rounds say 0.5 and half 1.5


class Decoder(nn.Module):
    def forward(self, x: Tensor, past_key_values: tuple[Tensor, ...] = ()) -> Tensor:
        return x - 1.0


@pytest.mark.parametrize("slow", [0, 1])
def test_neither_a_prompt_nor_a_step_may_be_slower(monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
    """What the other gains does not speak for it."""
    seen, slower = list[int](), [slow, slow]

    def timed(candidates: Any, **_: Any) -> Timings:
        seen.append(len(seen) % 2)
        before = 1.0 if seen[-1] in slower else 9.0
        return Timings([{name: before if name == "before" else 2.0 for name in candidates}] * 9)

    monkeypatch.setattr(timing, "time_candidates", timed)
    calls = [fxopt.Inputs(X), fxopt.Inputs(X[:1], past_key_values=(X,))]

    def run() -> Manager:
        manager = manager_of(capture_program(Decoder().eval(), calls), time=True, budget=TimeBudget(100.0, timing=80.0))
        manager.run([Subtract()])
        return manager

    label = ("prompt", "step")[slow]
    assert set(outcomes(run())) == {("undone", f"the {label} of the model was slower with it (0.5x)")}
    seen.clear()
    slower.clear()
    timings = run().timings
    assert timings is not None and timings["before_ms"] == 18000.0
    assert {name: each["speedup"] for name, each in timings["calls"].items()} == {"prompt": 4.5, "step": 4.5}


@pytest.mark.parametrize(("at_sites", "races"), [(3.0, 3), (2.005, 2)])
def test_more_races_are_asked_where_the_sites_say_otherwise(
    monkeypatch: pytest.MonkeyPatch, at_sites: float, races: int
) -> None:
    of_the_whole = list[int]()

    def timed(candidates: Any, **_: Any) -> Timings:
        whole = isinstance(candidates["before"].module, nn.Sequential)
        of_the_whole.append(int(whole and len(candidates) == 2))
        first = 1.9 if whole else at_sites
        return Timings([{name: first if name == "before" else 2.0 for name in candidates}] * 9)

    monkeypatch.setattr(timing, "time_candidates", timed)
    manager = managed(TimeBudget(100.0), Subtract())
    assert [status for status, _ in outcomes(manager)] == ["undone"] * 3
    assert sum(of_the_whole) == 3 * races  # the sites go one by one, each after a race of those without one


@dataclasses.dataclass(frozen=True)
class AddOnce(Pass):
    """Write `x + 1 + 1` as `x + 2`, or the sum of two as a call of torch.add for each."""

    goal: ClassVar[Goal] = Goal.SPEED
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    fewer: bool = True

    def find(self, program: Program) -> Iterator[Site]:
        for owner, capture in program.captures.items():
            added = [node for node in capture.specializations[0].graph.nodes if node.op == "call_function"]
            if owner and len(added) == 2 and added[1].args[1:] == (1.0,):
                yield Site(program, owner, {"first": added[0].name, "last": added[1].name})

    def rewrite(self, site: Site, edit: Edit) -> None:
        first, last = edit.graph_node("first"), edit.graph_node("last")
        once = edit.call(torch.add, first.args[0] if self.fewer else first, 2.0 if self.fewer else 1.0, before=last)
        edit.replace(last, once)


class AddTwice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1.0 + 1.0


def seems_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every race of a whole model come out at 0.95x, from 0.9x to 1.05x, and of every site at 2x."""

    def timed(candidates: Any, **_: Any) -> Timings:
        whole = "after" in candidates and isinstance(candidates["before"].module, nn.Sequential)
        rounds = [0.9, 0.95, 1.05] * 4 if whole else [2.0] * 9
        return Timings([{name: each if name == "before" else 1.0 for name in candidates} for each in rounds])

    monkeypatch.setattr(timing, "time_candidates", timed)


@pytest.mark.parametrize(("fewer", "status"), [(True, "applied"), (False, "undone")])
def test_within_the_noise_untimed_rewrites_stay_that_remove_operations(
    monkeypatch: pytest.MonkeyPatch, fewer: bool, status: str
) -> None:
    seems_slower(monkeypatch)
    model = nn.Sequential(AddTwice(), Block(2)).eval()
    manager = managed(TimeBudget(100.0, timing=80.0), AddOnce(fewer=fewer), model=model)
    assert [(decision.status, "untimed" in decision.figures) for decision in manager.decisions] == [(status, True)]


@pytest.mark.parametrize(
    ("speeds", "status"), [((0.96, 0.99), "undone"), ((0.97, 1.05), "applied"), ((1.01,), "applied")]
)
def test_races_together_judge_what_nothing_else_speaks_for(
    monkeypatch: pytest.MonkeyPatch, speeds: tuple[float, ...], status: str
) -> None:
    left = list(speeds)

    def timed(candidates: Any, **_: Any) -> Timings:
        speed = left.pop(0)
        rounds = [{name: each if name == "before" else 1.0 for name in candidates} for each in (0.9, speed, 1.1)]
        return Timings(rounds * 4)

    monkeypatch.setattr(timing, "time_candidates", timed)
    model = nn.Sequential(AddTwice(), Block(2)).eval()
    manager = managed(TimeBudget(100.0, timing=80.0), AddOnce(fewer=False), model=model)
    assert (outcomes(manager)[0][0], left) == (status, [])


@dataclasses.dataclass(frozen=True)
class AddAbout(AddOnce):
    """The same, within a budget of error."""

    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    fewer: bool = False
    budget: float = 0.05


@pytest.mark.parametrize(
    ("speeds", "status", "said"),
    [
        ((1.2,), "applied", ""),
        ((1.04, 1.04), "undone", "the whole model was not clearly faster with it"),
        ((0.98, 0.98), "undone", "the whole model was slower with it"),
    ],
)
def test_what_makes_errors_goes_where_nothing_shows_that_it_gains(
    monkeypatch: pytest.MonkeyPatch, speeds: tuple[float, ...], status: str, said: str
) -> None:
    left = list(speeds)

    def timed(candidates: Any, **_: Any) -> Timings:
        speed = left.pop(0)
        spread = [{name: speed + each if name == "before" else 1.0 for name in candidates} for each in (-0.05, 0, 0.05)]
        return Timings(spread * 4)

    monkeypatch.setattr(timing, "time_candidates", timed)
    model = nn.Sequential(AddTwice(), Block(2)).eval()
    manager = managed(TimeBudget(100.0, timing=80.0), AddAbout(), model=model)
    ((found, reason),) = outcomes(manager)
    assert (found, left) == (status, [])
    assert reason.startswith(said) and bool(reason) == bool(said)


def test_within_the_noise_what_was_faster_at_its_site_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seems_slower(monkeypatch)
    assert outcomes(managed(TimeBudget(1e9), Subtract())) == [("applied", "")] * 3


def test_a_slower_model_without_time_to_learn_why_loses_all(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = TimeBudget(1e9)

    def timed(candidates: Any, **_: Any) -> Timings:
        whole = "after" in candidates and not isinstance(candidates["before"].module, Block)
        budget.spent = 1e9 if whole else 0.0
        return Timings([{name: 1.0 if (name == "before") == whole else 2.0 for name in candidates}] * 9)

    monkeypatch.setattr(timing, "time_candidates", timed)
    manager = managed(budget, Subtract())
    assert {status for status, _ in outcomes(manager)} == {"undone"}
    assert sum("was spent" in reason for _, reason in outcomes(manager)) == 2


def test_optimize_takes_a_budget_and_reports_what_it_took() -> None:
    fast = fxopt.optimize(net(), Subtract(), example_inputs=(X,), time_budget=0)
    assert {decision.status for decision in fxopt.plan(fast).decisions} == {"skipped"}
    assert (
        str(fxopt.report(fast)).count("not checked: the time budget of 0 s was spent; allow more by time_budget") == 1
    )
    spent = fxopt.report(fxopt.optimize(net(), Tidy(), example_inputs=(X,), time_budget=math.inf)).to_json()["spent"]
    assert spent["budget_s"] is None
    assert min(spent["seconds"], spent["forward_ms"]) > 0


def test_without_inputs_there_is_nothing_to_save() -> None:
    fast = fxopt.optimize(net(), Tidy(), time_budget=0)
    assert {decision.status for decision in fxopt.plan(fast).decisions} == {"applied"}
    assert fxopt.report(fast).to_json()["spent"] is None


def test_the_environment_sets_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOPT_TIME_BUDGET", "a while")
    with pytest.raises(UsageError, match="time_budget='a while'"):
        fxopt.optimize(net(), Tidy())


@pytest.mark.parametrize(("seconds", "statuses"), [(1.0, ["applied"] * 6), (40.0, ["skipped"] * 4)])
def test_what_finding_takes_is_spent(races: list[list[str]], seconds: float, statuses: list[str]) -> None:
    """Where nothing is left, the sites of the next pass are not even looked for."""
    now = [0.0]

    class Searching(Subtract):
        def find(self, program: Program) -> Iterator[Site]:
            now[0] += seconds
            return super().find(program)

    class Later(Searching):
        pass

    budget = TimeBudget(50.0, forward=1.0, clock=lambda: now[0])  # 30 s of them for sites, and 6 more for writing
    manager = managed(budget, Searching(), Later())
    assert budget.stages["finding sites"] == (2 * seconds if seconds < 36.0 else seconds)
    assert [status for status, _ in outcomes(manager)] == statuses


@pytest.mark.parametrize(("forward", "phase"), [(1e-4, Phase.BOTH), (1.0, Phase.EVAL)])
def test_clean_ups_of_a_large_model_hold_in_evaluation_where_training_would_take_too_long_to_verify(
    forward: float, phase: Phase
) -> None:
    manager = managed(TimeBudget(40.0, forward), Tidy(), model=net(1))
    (rewrite,) = manager.rewrites
    assert (rewrite.phase, rewrite.decision.figures["checked"]) == (phase, "float64")
    for training in (True, False):
        torch.testing.assert_close(manager.program.model.train(training)(X), net(1)(X), rtol=0, atol=0)


@pytest.mark.parametrize(("forward", "status"), [(1e-4, "applied"), (1.0, "refused")])
def test_clean_ups_of_a_large_model_leave_time_to_other_passes_in_training(forward: float, status: str) -> None:
    ((found, reason),) = outcomes(managed(TimeBudget(40.0, forward), Tidy(), model=net(1).train()))
    assert (found, "time_budget" in reason) == (status, status == "refused")

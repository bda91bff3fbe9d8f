"""What a pass takes that others would rewrite stays where the model is faster with it: these run without it, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from support.contests import Write, X, blocks, by_status, run, written_in
from support.runs import manager_of

import fxopt
from fxopt.passes import timing
from fxopt.passes.contract import Pass
from fxopt.passes.rewriting import Edit
from fxopt.passes.sites import Site
from fxopt.passes.timing import TimeBudget, Timings
from fxopt.tracing.program import Program

NAMES = {torch.sub: "taken", torch.subtract: "own", torch.multiply: "before"}


@dataclasses.dataclass(frozen=True)
class Take(Write):
    """Write the same in another way, and before the others."""

    contested: ClassVar[bool] = True
    function: Any = torch.sub
    required: bool = False

    def find(self, program: Program) -> Iterator[Site]:
        yield from (dataclasses.replace(site, required=self.required) for site in super().find(program))


BEFORE = Write(torch.multiply, "mul")
"""A pass that runs before the others, and finds products."""
TAKE_BY_NAME = Take(torch.multiply, "mul", required=True)
"""A pass of the same kind that somebody named, and that finds products."""


@dataclasses.dataclass(frozen=True)
class Convert(Take):
    """Take the same in one of two ways, each of which takes 30 s to write."""

    budget_of: Any = dataclasses.field(default=None, compare=False)

    def find(self, program: Program) -> Iterator[Site]:
        yield from (dataclasses.replace(site, choices=("one", "two")) for site in super().find(program))

    def rewrite(self, site: Site, edit: Edit) -> None:
        super().rewrite(site, edit)
        self.budget_of.spent += 30.0


@pytest.mark.parametrize(("gain", "ways"), [(1.2, ["one"]), (2.0, ["one", "two"])])
def test_the_time_for_a_contest_that_will_not_be_is_for_another_lowering(
    monkeypatch: pytest.MonkeyPatch, gain: float, ways: list[str]
) -> None:
    monkeypatch.setattr(timing, "rough_ratio", lambda before, after: gain)
    budget = TimeBudget(100.0, forward=0.01)  # 75 for sites, half of which are for the contest
    manager, _ = run(
        monkeypatch, NAMES, {"taken": -5, "own": -10, "before": 0}, Convert(budget_of=budget), Write(), budget=budget
    )
    (decision, *_) = (each for each in manager.decisions if each.pass_name == "convert")
    assert list(decision.figures["lowerings"]) == ways


def test_what_is_faster_without_it_is_given_to_the_passes_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, _ = run(monkeypatch, NAMES, {"taken": -5, "own": -10, "before": -1}, BEFORE, Take(), Write())
    assert written_in(manager.program.model, NAMES) == {"own": 2, "before": 2}
    assert by_status(manager) == {("take", "undone"): 2, ("write", "applied"): 4}
    reasons = {decision.reason for decision in manager.decisions if decision.reason}
    assert reasons == {"without it, the passes behind it make the whole model 1.13x as fast"}
    assert [each.applied for each in manager.traces] == [2, 2, 2]
    plan = manager.plan([BEFORE, Take(), Write()])
    again = manager_of(fxopt.capture(blocks(), (X,)))
    again.repeat([BEFORE, Take(), Write()], plan, verified=False)
    assert written_in(again.program.model, NAMES) == {"own": 2, "before": 2}


def test_what_is_faster_with_it_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, _ = run(monkeypatch, NAMES, {"taken": -10, "own": -5, "before": -1}, BEFORE, Take(), Write())
    assert written_in(manager.program.model, NAMES) == {"taken": 2, "before": 2}
    assert by_status(manager) == {("take", "applied"): 2, ("write", "applied"): 2}
    assert [each.applied for each in manager.traces] == [2, 2, 0]


def test_what_is_as_fast_without_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, _ = run(monkeypatch, NAMES, {"taken": -5, "own": -5}, Take(), Write())
    assert written_in(manager.program.model, NAMES) == {"own": 2}


@pytest.mark.parametrize(
    "passes",
    [(Take(required=True), Write()), (Take(), TAKE_BY_NAME, Write()), (Take(),), (Take(), Take())],
    ids=["asked for by name", "another one asked for by name", "nothing behind it", "itself behind it"],
)
def test_there_is_no_contest_without_a_choice(monkeypatch: pytest.MonkeyPatch, passes: tuple[Pass, ...]) -> None:
    manager, races = run(monkeypatch, NAMES, {"taken": -5, "own": -10, "before": -1}, *passes)
    by_name = {"before": 2} if TAKE_BY_NAME in passes else {}
    assert written_in(manager.program.model, NAMES) == {"taken": 2, **by_name}
    assert races <= 1
    assert all(each.status == "applied" for each in manager.decisions)


@dataclasses.dataclass(frozen=True)
class Breaks(Write):
    """Raise where it finds what was taken the first time, as it looks or as it writes the second place."""

    where: str = "find"

    def find(self, program: Program) -> Iterator[Site]:
        for site in super().find(program):
            if self.where == "find":
                program.module(site.owner).odd = True  # in `find` nothing may be changed
            yield site

    def rewrite(self, site: Site, edit: Edit) -> None:
        super().rewrite(site, edit)
        if site.owner == "1":
            raise fxopt.CalibrationError("no data") if self.where == "data" else KeyError(site.owner)


@pytest.mark.parametrize(
    ("where", "said"),
    [("find", "find must change nothing"), ("rewrite", "(site 1:sub) raised KeyError: '1'"), ("data", "no data")],
)
def test_where_a_pass_raises_without_it_the_first_model_stays(
    monkeypatch: pytest.MonkeyPatch, where: str, said: str
) -> None:
    manager, races = run(
        monkeypatch, NAMES, {"taken": -5, "own": -10, "before": -1}, BEFORE, Take(), Breaks(where=where)
    )
    assert written_in(manager.program.model, NAMES) == {"taken": 2, "before": 2}
    assert races == 1  # of the model as it stands
    assert not any(hasattr(module, "odd") for module in manager.program.model.modules())
    assert by_status(manager) == {("write", "applied"): 2, ("take", "applied"): 2, ("breaks", "skipped"): 1}
    note = manager.decisions[-1]
    assert (note.step, note.cause, note.values["without"]) == (2, "whole_model.raised_without", "take")
    assert "run again without what take took, it raised" in note.reason and said in note.reason
    assert len(manager.traces) == 3


def test_the_report_says_that_a_pass_raised_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        timing,
        "time_candidates",
        lambda candidates, **_: Timings([{name: 1.2 if name == "before" else 1.0 for name in candidates}] * 9),
    )
    model = blocks()
    fast = fxopt.optimize(model, [Take(), Breaks()], example_inputs=(X,), time_budget=100.0)
    assert torch.equal(fast(X), model(X))
    assert "breaks at (root): run again without what take took, it raised" in str(fxopt.report(fast))


def test_without_time_for_it_what_stands_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = TimeBudget(1.0, forward=0.05, timing=0.9)
    manager, _ = run(monkeypatch, NAMES, {"taken": -5, "own": -10}, Take(), Write(), budget=budget)
    assert written_in(manager.program.model, NAMES) == {"taken": 2}
    assert {decision.status for decision in manager.decisions} == {"applied"}

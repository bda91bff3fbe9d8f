"""Where all goes that a pass took for itself, since the model is slower, the passes behind it find its places again."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from support.contests import Write, X, blocks, by_status, run, written_in
from support.runs import manager_of

import fxopt
from fxopt.passes.rewriting import Edit
from fxopt.passes.sites import Numerics, Site
from fxopt.passes.timing import TimeBudget

NAMES = {torch.sub: "rounded", torch.subtract: "own", torch.multiply: "product"}


@dataclasses.dataclass(frozen=True)
class Untimed(Write):
    """It is not timed by itself."""

    profiles_itself: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class Multiply(Untimed):
    """The same for products."""

    function: Any = torch.multiply
    found: str = "mul"


@dataclasses.dataclass(frozen=True)
class Round(Untimed):
    """Take differences first, within an error."""

    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    function: Any = torch.sub


@dataclasses.dataclass(frozen=True)
class Yield(Round):
    """The same, where nothing else is faster."""

    yields: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class Take(Untimed):
    """Take what is left as an engine would."""

    contested: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class Breaks(Untimed):
    """Raise where it writes anything."""

    def rewrite(self, site: Site, edit: Edit) -> None:
        raise KeyError(site.owner)


def test_the_passes_behind_take_what_an_approximate_one_had(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = (Round(), Untimed())
    manager, _ = run(monkeypatch, NAMES, {"rounded": 20, "own": -10}, *passes)
    assert written_in(manager.program.model, NAMES) == {"own": 2}
    assert by_status(manager) == {("round", "undone"): 2, ("untimed", "applied"): 2}
    assert {each.cause for each in manager.decisions if each.reason} == {"whole_model.slower"}
    assert [each.applied for each in manager.traces] == [2, 2]
    assert manager.timings is not None and manager.timings["speedup"] == pytest.approx(100 / 80)
    again = manager_of(fxopt.capture(blocks(), (X,)))
    again.repeat(passes, manager.plan(passes), verified=False)
    assert written_in(again.program.model, NAMES) == {"own": 2}


def test_they_have_as_much_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = TimeBudget(1.0, forward=0.001, spent=0.999)
    manager, _ = run(monkeypatch, NAMES, {"rounded": 20, "own": -10}, Round(), Untimed(), budget=budget)
    assert written_in(manager.program.model, NAMES) == {"own": 2}


def test_what_others_gain_stays_unless_what_is_found_now_gains_more(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"rounded": 20, "product": -10}
    manager, _ = run(monkeypatch, NAMES, {**costs, "own": -10}, Round(), Untimed(), Multiply())
    assert written_in(manager.program.model, NAMES) == {"own": 2, "product": 2}
    manager, _ = run(monkeypatch, NAMES, {**costs, "own": 5}, Round(), Untimed(), Multiply())
    assert written_in(manager.program.model, NAMES) == {"product": 2}
    assert by_status(manager) == {("round", "undone"): 2, ("multiply", "applied"): 2}
    assert [each.applied for each in manager.traces] == [2, 0, 2]


def test_nothing_runs_again_where_a_part_stays_or_nothing_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, races = run(monkeypatch, NAMES, {"rounded": -5, "own": -10}, Round(), Untimed())
    assert written_in(manager.program.model, NAMES) == {"rounded": 2} and races == 1
    manager, _ = run(monkeypatch, NAMES, {"own": 15, "product": -5}, Untimed(), Multiply())
    assert written_in(manager.program.model, NAMES) == {"product": 2}
    assert [each.applied for each in manager.traces] == [2, 2]


def test_nothing_runs_a_third_time(monkeypatch: pytest.MonkeyPatch) -> None:
    another = dataclasses.make_dataclass("Another", [], bases=(Round,), frozen=True)()
    manager, _ = run(monkeypatch, NAMES, {"rounded": 20, "own": -10}, Round(), another, Untimed())
    assert written_in(manager.program.model, NAMES) == {}
    assert by_status(manager) == {("round", "undone"): 2}


def test_where_a_pass_raises_then_what_stood_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, _ = run(monkeypatch, NAMES, {"rounded": 20, "product": -10}, Round(), Breaks(), Multiply())
    assert written_in(manager.program.model, NAMES) == {"product": 2}
    note = manager.decisions[-1]
    assert (note.pass_name, note.cause) == ("breaks", "whole_model.raised_without")


@pytest.mark.parametrize(
    ("rounded", "own", "stays"), [(-10, -12, "own"), (-10, -5, "rounded"), (-10, -10, "rounded"), (-20, -30, "rounded")]
)
def test_one_that_yields_stays_only_where_it_is_fastest_or_gains_much(
    monkeypatch: pytest.MonkeyPatch, rounded: float, own: float, stays: str
) -> None:
    manager, races = run(monkeypatch, NAMES, {"rounded": rounded, "own": own}, Yield(), Take())
    assert written_in(manager.program.model, NAMES) == {stays: 2}
    assert (races == 1) is (rounded == -20)  # it gains 1.67x: nothing runs again
    if stays == "own":
        assert by_status(manager) == {("yield", "undone"): 2, ("take", "applied"): 2}
        reasons = {each.reason for each in manager.decisions if each.reason}
        assert reasons == {"without it, the passes behind it make the whole model 1.05x as fast"}
        assert manager.timings is not None and manager.timings["speedup"] == pytest.approx(100 / 76)
    else:
        assert by_status(manager) == {("yield", "applied"): 2}
        assert [each.applied for each in manager.traces] == [2, 0]


def test_one_that_yields_is_not_compared_where_no_contested_pass_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, races = run(monkeypatch, NAMES, {"rounded": -5, "own": -10}, Yield(), Untimed())
    assert written_in(manager.program.model, NAMES) == {"rounded": 2} and races == 1

"""Where all goes that a pass took for itself, since the model is slower, the passes behind it find its places again."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from support.runs import manager_of
from torch import Tensor, nn

import fxopt
from fxopt.passes import timing
from fxopt.passes.contract import Pass
from fxopt.passes.driver import Manager
from fxopt.passes.rewriting import Edit, operation
from fxopt.passes.sites import Goal, Numerics, Site
from fxopt.passes.timing import TimeBudget, Timings
from fxopt.runtime.graphs import capture_of
from fxopt.tracing.program import Program

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
NAMES = {torch.sub: "rounded", torch.subtract: "own", torch.multiply: "product"}


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - 1.0) * 2.0


@dataclasses.dataclass(frozen=True)
class Write(Pass):
    """Write an operation that nobody has written as a call of a function; it is not timed by itself."""

    goal: ClassVar[Goal] = Goal.SPEED
    numerics: ClassVar[Numerics] = Numerics.EXACT
    profiles_itself: ClassVar[bool] = True
    function: Any = torch.subtract
    found: str = "sub"

    def find(self, program: Program) -> Iterator[Site]:
        for match in program.matches(operation(self.found, name="it")):
            if match["it"].target not in NAMES:
                yield match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("it")
        edit.replace(node, edit.call(self.function, *node.args))


@dataclasses.dataclass(frozen=True)
class Multiply(Write):
    """The same for products."""

    function: Any = torch.multiply
    found: str = "mul"


@dataclasses.dataclass(frozen=True)
class Round(Write):
    """Take differences first, within an error."""

    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    function: Any = torch.sub


@dataclasses.dataclass(frozen=True)
class Yield(Round):
    """The same, where nothing else is faster."""

    yields: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class Take(Write):
    """Take what is left as an engine would."""

    contested: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class Breaks(Write):
    """Raise where it writes anything."""

    def rewrite(self, site: Site, edit: Edit) -> None:
        raise KeyError(site.owner)


def written_in(model: nn.Module) -> Counter[str]:
    captures = [capture for each in model.modules() if (capture := capture_of(each)) is not None]
    nodes = (node for capture in captures for node in capture.specializations[0].graph.nodes)
    return Counter(NAMES[node.target] for node in nodes if node.target in NAMES)


def run(
    monkeypatch: pytest.MonkeyPatch, costs: Mapping[str, float], *passes: Pass, budget: TimeBudget | None = None
) -> tuple[Manager, Callable[[], int]]:
    """Run passes on two blocks; the whole model costs 100, and each written operation what is said. Count the races."""
    races: list[Mapping[str, Any]] = []

    def raced(candidates: Mapping[str, Any], **_: Any) -> Timings:
        races.append(candidates)

        def cost(model: nn.Module) -> float:
            return 100.0 + sum(costs[name] * count for name, count in written_in(model).items())

        return Timings([{name: cost(each.module) for name, each in candidates.items()}] * 9)

    monkeypatch.setattr(timing, "time_candidates", raced)
    budget = budget or TimeBudget(100.0, forward=0.01, timing=80.0)
    model = nn.Sequential(Block(), Block()).eval()
    manager = manager_of(fxopt.capture(model, (X,)), budget=budget)
    manager.run(passes)
    assert torch.equal(manager.program.model(X), model(X))
    return manager, lambda: len(races)


def by_status(manager: Manager) -> Counter[tuple[str, str]]:
    return Counter((decision.pass_name, decision.status) for decision in manager.decisions)


def test_the_passes_behind_take_what_an_approximate_one_had(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = (Round(), Write())
    manager, _ = run(monkeypatch, {"rounded": 20, "own": -10}, *passes)
    assert written_in(manager.program.model) == {"own": 2}
    assert by_status(manager) == {("round", "undone"): 2, ("write", "applied"): 2}
    assert {each.cause for each in manager.decisions if each.reason} == {"whole_model.slower"}
    assert [each.applied for each in manager.traces] == [2, 2]
    assert manager.timings is not None and manager.timings["speedup"] == pytest.approx(100 / 80)
    again = manager_of(fxopt.capture(nn.Sequential(Block(), Block()).eval(), (X,)))
    again.repeat(passes, manager.plan(passes), verified=False)
    assert written_in(again.program.model) == {"own": 2}


def test_they_have_as_much_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = TimeBudget(1.0, forward=0.001, spent=0.999)
    manager, _ = run(monkeypatch, {"rounded": 20, "own": -10}, Round(), Write(), budget=budget)
    assert written_in(manager.program.model) == {"own": 2}


def test_what_others_gain_stays_unless_what_is_found_now_gains_more(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"rounded": 20, "product": -10}
    manager, _ = run(monkeypatch, {**costs, "own": -10}, Round(), Write(), Multiply())
    assert written_in(manager.program.model) == {"own": 2, "product": 2}
    manager, _ = run(monkeypatch, {**costs, "own": 5}, Round(), Write(), Multiply())
    assert written_in(manager.program.model) == {"product": 2}
    assert by_status(manager) == {("round", "undone"): 2, ("multiply", "applied"): 2}
    assert [each.applied for each in manager.traces] == [2, 0, 2]


def test_nothing_runs_again_where_a_part_stays_or_nothing_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, races = run(monkeypatch, {"rounded": -5, "own": -10}, Round(), Write())
    assert written_in(manager.program.model) == {"rounded": 2} and races() == 1
    manager, _ = run(monkeypatch, {"own": 15, "product": -5}, Write(), Multiply())
    assert written_in(manager.program.model) == {"product": 2}
    assert [each.applied for each in manager.traces] == [2, 2]


def test_several_go_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    another = dataclasses.make_dataclass("Another", [], bases=(Round,), frozen=True)()
    manager, _ = run(monkeypatch, {"rounded": 20, "own": -10}, Round(), another, Write())
    assert written_in(manager.program.model) == {"own": 2}
    assert by_status(manager) == {("round", "undone"): 2, ("another", "undone"): 2, ("write", "applied"): 2}


def test_where_a_pass_raises_then_what_stood_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, _ = run(monkeypatch, {"rounded": 20, "product": -10}, Round(), Breaks(), Multiply())
    assert written_in(manager.program.model) == {"product": 2}
    note = manager.decisions[-1]
    assert (note.pass_name, note.cause) == ("breaks", "whole_model.raised_without")


@pytest.mark.parametrize(
    ("rounded", "own", "stays"), [(-10, -12, "own"), (-10, -5, "rounded"), (-10, -10, "rounded"), (-20, -30, "rounded")]
)
def test_one_that_yields_stays_only_where_it_is_fastest_or_gains_much(
    monkeypatch: pytest.MonkeyPatch, rounded: float, own: float, stays: str
) -> None:
    manager, races = run(monkeypatch, {"rounded": rounded, "own": own}, Yield(), Take())
    assert written_in(manager.program.model) == {stays: 2}
    assert (races() == 1) is (rounded == -20)  # it gains 1.67x: nothing runs again
    if stays == "own":
        assert by_status(manager) == {("yield", "undone"): 2, ("take", "applied"): 2}
        reasons = {each.reason for each in manager.decisions if each.reason}
        assert reasons == {"without it, the passes behind it make the whole model 1.05x as fast"}
        assert manager.timings is not None and manager.timings["speedup"] == pytest.approx(100 / 76)
    else:
        assert by_status(manager) == {("yield", "applied"): 2}
        assert [each.applied for each in manager.traces] == [2, 0]


def test_one_that_yields_is_not_compared_where_no_contested_pass_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, races = run(monkeypatch, {"rounded": -5, "own": -10}, Yield(), Write())
    assert written_in(manager.program.model) == {"rounded": 2} and races() == 1

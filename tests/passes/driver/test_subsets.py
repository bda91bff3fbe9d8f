"""A model that is slower as a whole keeps the rewrites that gain: variants without some of them are raced."""

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
from fxopt.passes.driver.whole_model.races import Race, all_slower
from fxopt.passes.rewriting import Edit, operation
from fxopt.passes.sites import Goal, Numerics, Site
from fxopt.passes.timing import TimeBudget, Timings
from fxopt.runtime.graphs import capture_of
from fxopt.tracing.program import Program

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
BLOCKS = 8

Costs = Callable[[str, int], float]
"""What a call of the model costs more where an operator is called in a block with so many rows."""


class Block(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.weight.sum(0)) * 2.0


def net() -> nn.Sequential:
    return nn.Sequential(*(Block(rows) for rows in range(BLOCKS))).eval()


@dataclasses.dataclass(frozen=True)
class Write(Pass):
    """Write an operation as a call of a function, which must take the same."""

    goal: ClassVar[Goal] = Goal.SPEED
    numerics: ClassVar[Numerics] = Numerics.EXACT
    found: str = "sub"
    function: Any = torch.sub

    def find(self, program: Program) -> Iterator[Site]:
        for match in program.matches(operation(self.found, name="it")):
            if match["it"].target is not self.function:
                yield match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("it")
        edit.replace(node, edit.call(self.function, *node.args))


@dataclasses.dataclass(frozen=True)
class WriteMultiply(Write):
    """The same for products."""

    found: str = "mul"
    function: Any = torch.mul


@dataclasses.dataclass(frozen=True)
class OnTop(Write):
    """Write what `Write` has written once more; nothing else."""

    function: Any = torch.subtract

    def find(self, program: Program) -> Iterator[Site]:
        for match in program.matches(operation("sub", name="it")):
            if match["it"].target is torch.sub:
                yield match.site()


def written_in(model: nn.Module) -> Counter[tuple[str, int]]:
    """Return the functions that passes have written, with the rows of their blocks."""
    functions = {torch.sub: "sub", torch.mul: "mul", torch.subtract: "subtract"}
    found: Counter[tuple[str, int]] = Counter()
    for block in model.modules():
        capture = capture_of(block) if isinstance(block, Block) else None
        for node in capture.specializations[0].graph.nodes if capture else ():
            if node.target in functions:
                found[functions[node.target], len(block.weight)] += 1
    return found


class Races:
    """Timings as scripted: a model costs 100, and what its written functions cost more. What raced is noted."""

    def __init__(self, costs: Costs, budget: TimeBudget, ends_after: int = 1000) -> None:
        self.costs, self.budget, self.ends_after = costs, budget, ends_after
        self.seen: list[list[str]] = []

    def __call__(self, candidates: Mapping[str, Any], **_: Any) -> Timings:
        self.seen.append(list(candidates))
        if len(self.seen) >= self.ends_after:
            self.budget.spent = self.budget.seconds
        return Timings([{name: self._cost(each.module) for name, each in candidates.items()}] * 9)

    def _cost(self, model: nn.Module) -> float:
        return 100.0 + sum(self.costs(*written) for written in written_in(model))


def run(monkeypatch: pytest.MonkeyPatch, costs: Costs, *passes: Pass, ends_after: int = 1000) -> tuple[Manager, Races]:
    """Run passes whose sites are not timed on a model of blocks; the whole model is, as scripted."""
    budget = TimeBudget(100.0, forward=0.01, timing=80.0)
    races = Races(costs, budget, ends_after)
    monkeypatch.setattr(timing, "time_candidates", races)
    manager = manager_of(fxopt.capture(net(), (X,)), budget=budget)
    manager.run(passes)
    assert torch.equal(manager.program.model(X), net()(X))
    return manager, races


def standing(manager: Manager) -> set[tuple[str, int]]:
    return set(written_in(manager.program.model))


def all_of(*names: str) -> set[tuple[str, int]]:
    return {(name, rows) for name in names for rows in range(BLOCKS)}


def by_status(manager: Manager) -> Counter[tuple[str, str]]:
    return Counter((decision.pass_name, decision.status) for decision in manager.decisions)


def test_of_two_passes_the_one_that_loses_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, _ = run(monkeypatch, lambda name, _: 2.0 if name == "sub" else -1.0, Write(), WriteMultiply())
    assert standing(manager) == all_of("mul")
    assert by_status(manager) == {("write", "undone"): 8, ("write_multiply", "applied"): 8}
    assert {each.reason for each in manager.decisions if each.reason} == {"the whole model was slower with it (0.926x)"}
    assert manager.timings is not None and manager.timings["speedup"] == pytest.approx(100 / 92)


def test_of_a_pass_the_part_of_the_model_goes_where_it_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, _ = run(monkeypatch, lambda _, rows: 9.0 if rows in (4, 5) else -1.0, Write())
    assert standing(manager) == all_of("sub") - {("sub", 4), ("sub", 5)}


def test_both_ways_of_dividing_find_what_one_pass_loses_in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(name: str, rows: int) -> float:
        return 30.0 if (name, rows) == ("mul", 7) else -1.0

    manager, _ = run(monkeypatch, costs, Write(), WriteMultiply())
    assert standing(manager) >= all_of("sub")
    assert standing(manager) == all_of("sub", "mul") - {("mul", 6), ("mul", 7)}


def test_nothing_stays_where_all_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, _ = run(monkeypatch, lambda *_: 1.0, Write(), WriteMultiply())
    assert standing(manager) == set()
    assert by_status(manager) == {("write", "undone"): 8, ("write_multiply", "undone"): 8}
    assert manager.timings is None


@pytest.mark.parametrize("ends_after", [3, 4])
def test_the_best_that_was_measured_stays_where_time_is_out(monkeypatch: pytest.MonkeyPatch, ends_after: int) -> None:
    """The third race is of variants without a pass each, the fourth of those without parts of it."""

    def costs(name: str, rows: int) -> float:
        return (5.0 if rows in (2, 3) else 1.0) if name == "sub" else -1.0

    manager, races = run(monkeypatch, costs, Write(), WriteMultiply(), ends_after=ends_after)
    assert standing(manager) == all_of("mul")
    assert races.seen[:2] == [["before", "after"]] * 2
    assert all(len(seen) > 2 for seen in races.seen[2:4])
    assert len(races.seen) == ends_after
    assert manager.timings is not None and manager.timings["speedup"] == pytest.approx(100 / 92)


def test_nothing_stays_where_time_is_out_and_all_that_was_measured_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, races = run(monkeypatch, lambda *_: 1.0, Write(), WriteMultiply(), ends_after=3)
    assert standing(manager) == set()
    assert len(races.seen) == 3
    assert sum("was spent" in each.reason for each in manager.decisions) == 8


def test_no_variant_is_written_where_the_budget_is_spent_before(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, races = run(
        monkeypatch, lambda name, _: 2.0 if name == "sub" else -1.0, Write(), WriteMultiply(), ends_after=2
    )
    assert standing(manager) == set()
    assert races.seen == [["before", "after"]] * 2


def test_what_stands_on_a_rewrite_goes_with_it_and_what_does_not_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager, _ = run(monkeypatch, lambda name, _: -1.0 if name == "mul" else 2.0, Write(), OnTop(), WriteMultiply())
    assert standing(manager) == all_of("mul")
    reasons = {(each.pass_name, each.reason.partition(":")[0]) for each in manager.decisions}
    assert reasons == {
        ("write", "the whole model was slower with it (0.926x)"),
        ("on_top", "it depended on a rewrite that was undone"),
        ("write_multiply", ""),
    }


def test_within_the_noise_only_a_part_of_what_nothing_speaks_for_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = TimeBudget(100.0, forward=0.01, timing=80.0)

    class Noisy(Races):
        def __call__(self, candidates: Mapping[str, Any], **options: Any) -> Timings:
            found = super().__call__(candidates, **options)
            for number, each in enumerate(found.rounds):
                found.rounds[number] = {
                    n: s * (1.2 if n == "before" and number % 3 == 0 else 1.0) for n, s in each.items()
                }
            return found

    monkeypatch.setattr(timing, "time_candidates", Noisy(lambda _, rows: 9.0 if rows < 2 else -1.0, budget))
    manager = manager_of(fxopt.capture(net(), (X,)), budget=budget)
    manager.run([Write()])
    assert standing(manager) == all_of("sub") - {("sub", 0), ("sub", 1)}


@dataclasses.dataclass(frozen=True)
class Needs(Write):
    """Write products so that the model raises where nothing has written its differences."""

    found: str = "mul"
    function: Any = torch.mul

    def rewrite(self, site: Site, edit: Edit) -> None:
        super().rewrite(site, edit)
        if not any(node.target is torch.sub for node in edit.graph.nodes):
            edit.replace(edit.graph.output_node().args[0], edit.call(torch.diag, edit.graph.output_node().args[0]))


def test_a_variant_that_does_not_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, _ = run(monkeypatch, lambda name, rows: 4.0 if rows == 0 else -0.1, Write(), Needs())
    assert standing(manager) == all_of("sub", "mul") - {(name, rows) for name in ("sub", "mul") for rows in (0, 1)}


@pytest.mark.parametrize(("again", "stays"), [(1.0, True), (0.9, False)])
def test_where_time_is_out_and_a_variant_is_in_doubt_it_races_once_more(
    monkeypatch: pytest.MonkeyPatch, again: float, stays: bool
) -> None:
    budget = TimeBudget(100.0, forward=0.01, timing=80.0)

    class Noisy(Races):
        def __call__(self, candidates: Mapping[str, Any], **options: Any) -> Timings:
            found = super().__call__(candidates, **options)
            factors = {3: (0.8, 0.97, 1.2), 4: (again, again, again * 1.2)}.get(len(self.seen), (1.0,))
            for number, each in enumerate(found.rounds):
                factor = factors[number % len(factors)]
                found.rounds[number] = {n: s * (factor if n == "before" else 1.0) for n, s in each.items()}
            return found

    races = Noisy(lambda name, _: 2.0 if name == "sub" else -0.1, budget, ends_after=3)
    monkeypatch.setattr(timing, "time_candidates", races)
    manager = manager_of(fxopt.capture(net(), (X,)), budget=budget)
    manager.run([Write(), WriteMultiply()])
    assert len(races.seen) == 4 and races.seen[3] == ["before", "after"]
    assert standing(manager) == (all_of("mul") if stays else set())


def test_rounds_of_several_races_tell_together_what_each_leaves_open() -> None:
    rounds = [{"before": ratio, "after": 1.0} for ratio in (0.9, 0.9, 0.9, 0.9, 0.9, 1.5)]
    race = Race({"": Timings(rounds)})
    assert all_slower([race]) is None
    assert all_slower([race, race]) == ""


class Swapped(nn.Tanh):
    """What `Swap` puts in the place of a layer."""


@dataclasses.dataclass(frozen=True)
class Swap(Pass):
    """Put another module in the place of each `Tanh`."""

    goal: ClassVar[Goal] = Goal.SPEED
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def find(self, program: Program) -> Iterator[Site]:
        for name, module in program.model.named_modules():
            if type(module) is nn.Tanh:
                yield Site(program, name, {})

    def rewrite(self, site: Site, edit: Edit) -> None:
        edit.replace_module("", Swapped())


def test_a_replaced_layer_that_goes_leaves_its_siblings_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(model: nn.Module) -> set[str]:
        return {name for name, module in model.named_modules() if isinstance(module, Swapped)}

    class Costly(Races):
        def _cost(self, model: nn.Module) -> float:
            return 100.0 + sum(9.0 if name == "0.0" else -1.0 for name in swapped(model))

    budget = TimeBudget(100.0, forward=0.01, timing=80.0)
    monkeypatch.setattr(timing, "time_candidates", Costly(lambda *_: 0.0, budget))
    pairs = nn.Sequential(*(nn.Sequential(nn.Tanh(), nn.Tanh()) for _ in range(2))).eval()
    manager = manager_of(fxopt.capture(pairs, (X,)), budget=budget)
    manager.run([Swap()])
    assert swapped(manager.program.model) == {"0.1", "1.0", "1.1"}
    assert {each.label for each in manager.decisions if each.status == "applied"} == {"0.1", "1.0", "1.1"}

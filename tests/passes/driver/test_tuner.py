"""Sites of one graph are decided as one, and taken apart only where something is wrong or does not pay."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import pytest
import torch
from support.runs import manager_of
from support.small_models import Stack
from torch import Tensor, fx, nn

import fxopt
from fxopt.errors import MatchFailure, PassError
from fxopt.passes import timing
from fxopt.passes.contract import Pass
from fxopt.passes.driver import Group, Manager, grouped, with_lowering
from fxopt.passes.driver.comparison import Comparison
from fxopt.passes.rewriting import Edit, operation
from fxopt.passes.sites import Goal, Numerics, Refusal, Site
from fxopt.passes.timing import Timings
from fxopt.runtime.graphs import capture_of
from fxopt.tracing.program import Program


class Net(nn.Module):
    """Four subtractions in one graph: of 1, 2, 3 and 4."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x - 1.0, x.sin() - 2.0
        return (a * b - 3.0).tanh() - 4.0


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass(frozen=True)
class Subtractions(Pass):
    """Write subtractions as functions, or as additions of what is negative.

    Options:
        wrong, unsuitable, broken: the numbers whose subtraction is written wrong, cannot be written, or raises.
        kinds: whether sites are alike: those of odd numbers, and those of even ones.
    """

    wrong: tuple[float, ...] = ()
    unsuitable: tuple[float, ...] = ()
    broken: tuple[float, ...] = ()
    kinds: bool = False

    goal: ClassVar[Goal] = Goal.SPEED
    choices: ClassVar[tuple[str, ...]] = ("sub", "neg")

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for match in program.matches(operation("sub", name="sub")):
            number = match["sub"].args[1]
            yield match.site(choices=self.choices, kind=number % 2 if self.kinds else None, label=f"minus {number:g}")

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("sub")
        left, number = node.args
        if number in self.unsuitable:
            raise MatchFailure("not this one")
        if number in self.broken:
            raise ValueError("broken")
        if number in self.wrong:
            edit.replace(node, edit.call(torch.add, left, number))
        elif site.choice == "neg":
            edit.replace(node, edit.call(torch.add, left, -number))
        else:
            edit.replace(node, edit.call(torch.sub, left, number))


@dataclasses.dataclass(frozen=True)
class ByDesign(Subtractions):
    numerics: ClassVar[Numerics] = Numerics.SEMANTIC


def managed(model: nn.Module, pass_: Pass, **options: object) -> Manager:
    manager = manager_of(fxopt.capture(model, (X,)), **{"time": False, **options})
    manager.run([pass_])
    return manager


def statuses(manager: Manager) -> dict[str, str]:
    return {decision.label: decision.status for decision in manager.decisions}


def written(graph: fx.Graph) -> dict[float, str]:
    """Return how each number is subtracted in a graph, of those that a pass has written."""
    return {
        abs(node.args[1]): "sub" if node.target is torch.sub else "neg"
        for node in graph.nodes
        if node.target in (torch.sub, torch.add)
    }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[dict[float, str]], float]], list[int]]:
    """Replace the clock by a function of what is written; return a list of how many candidates each race had."""

    def install(seconds: Callable[[dict[float, str]], float]) -> list[int]:
        races: list[int] = []

        def time_candidates(candidates: Mapping[str, timing.Runner], **options: object) -> Timings:
            races.append(len(candidates))
            graphs = {name: capture_of(run.module) for name, run in candidates.items()}
            taken = {name: seconds(written(c.specializations[0].graph)) if c else 1.0 for name, c in graphs.items()}
            return Timings([taken] * 20)

        monkeypatch.setattr(timing, "time_candidates", time_candidates)
        return races

    return install


ALL = {"minus 1": "applied", "minus 2": "applied", "minus 3": "applied", "minus 4": "applied"}


# -- together ------------------------------------------------------------------------------------------------------


def test_sites_of_one_graph_are_verified_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    references: list[nn.Module] = []
    taking = importlib.import_module("fxopt.passes.verification.reference")
    reference = taking.reference

    def noted(module: nn.Module, *args: object, **options: object) -> object:
        references.append(module)
        return reference(module, *args, **options)

    monkeypatch.setattr(taking, "reference", noted)
    manager = managed(Net(), Subtractions())
    assert statuses(manager) == ALL
    assert len(references) == 1
    assert len(manager.rewrites) == 1
    assert {decision.figures["group_size"] for decision in manager.decisions} == {4}
    assert {decision.figures["checked"] for decision in manager.decisions} == {"float64"}
    assert torch.allclose(manager.program.model(X), Net()(X))


def test_undoing_takes_all_of_them_back() -> None:
    manager = manager_of(program := fxopt.capture(Net(), (X,)), time=False)
    before = str(program.graph(""))
    manager.run([Subtractions()])
    assert str(program.graph("")) != before
    manager.rewrites[0].edit.undo()
    assert str(program.graph("")) == before


def test_new_nodes_name_their_own_sites() -> None:
    manager = managed(Net(), Subtractions())
    made = [node.meta["provenance"][1] for node in manager.program.graph("").nodes if "provenance" in node.meta]
    assert made == [decision.key for decision in manager.decisions]


def test_a_plan_repeats_sites_that_landed_together() -> None:
    first = managed(Net(), Subtractions())
    second = manager_of(fxopt.capture(Net(), (X,)))
    second.repeat([Subtractions()], first.plan([Subtractions()]), verified=False)
    assert str(second.program.graph("")) == str(first.program.graph(""))
    assert statuses(second) == ALL
    assert len(second.rewrites) == 1


def test_sites_of_a_pass_that_changes_the_function_are_decided_one_by_one() -> None:
    manager = managed(Net(), ByDesign(wrong=(2.0,)))
    assert statuses(manager) == ALL
    assert len(manager.rewrites) == 4


# -- apart ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [(2.0,), (1.0, 4.0), (1.0, 2.0, 3.0, 4.0)], ids=str)
def test_only_what_is_wrong_is_undone(wrong: tuple[float, ...]) -> None:
    manager = managed(Net(), Subtractions(wrong=wrong))
    assert statuses(manager) == {name: "undone" if float(name[6:]) in wrong else "applied" for name in ALL}
    undone = [decision.reason for decision in manager.decisions if decision.status == "undone"]
    assert all(reason.startswith("output differs") for reason in undone)
    assert torch.allclose(manager.program.model(X), Net()(X))


@pytest.mark.parametrize("check", [True, False])
def test_only_what_cannot_be_written_is_refused(check: bool) -> None:
    manager = managed(Net(), Subtractions(unsuitable=(3.0,)), check=check)
    assert statuses(manager) == {**ALL, "minus 3": "refused"}
    assert [decision.reason for decision in manager.decisions if decision.status == "refused"] == ["not this one"]


def test_what_raises_is_named_and_nothing_stays() -> None:
    program = fxopt.capture(Net(), (X,))
    before = str(program.graph(""))
    with pytest.raises(PassError, match=r"\(site \(root\):sub_2\) raised ValueError: broken"):
        manager_of(program, time=False).run([Subtractions(broken=(3.0,))])
    assert str(program.graph("")) == before


# -- what pays -----------------------------------------------------------------------------------------------------

CLOCKS = {
    "only together": (lambda taken: 0.5 if len(taken) == 4 else 1.0, {1: "sub", 2: "sub", 3: "sub", 4: "sub"}),
    "all but one": (lambda taken: 1.0 - 0.1 * len(taken) + 0.3 * (2 in taken), {1: "sub", 3: "sub", 4: "sub"}),
    "all but two": (
        lambda taken: 1.0 - 0.1 * len(taken) + 0.3 * (2 in taken) + 0.3 * (4 in taken),
        {1: "sub", 3: "sub"},
    ),
    "another lowering": (
        lambda taken: 1.0 - 0.2 * sum(how == "neg" for how in taken.values()),
        {1: "neg", 2: "neg", 3: "neg", 4: "neg"},
    ),
    "a mixture": (
        lambda taken: 1.0 - 0.1 * len(taken) - 0.1 * (taken.get(3) == "neg") - 0.1 * (taken.get(1) == "sub"),
        {1: "sub", 2: "sub", 3: "neg", 4: "sub"},
    ),
    "none": (lambda taken: 1.0 + 0.1 * len(taken), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOCKS)
def test_the_sites_that_pay_together_stay(name: str, clock: Callable[..., list[int]]) -> None:
    seconds, expected = CLOCKS[name]
    clock(seconds)
    manager = managed(Net(), Subtractions(), time=True)
    assert written(manager.program.graph("")) == expected
    applied = {decision.label for decision in manager.decisions if decision.status == "applied"}
    assert applied == {f"minus {number}" for number in expected}
    undone = [decision.reason for decision in manager.decisions if decision.status == "undone"]
    assert all(reason.startswith("no faster") and "as after" not in reason for reason in undone)
    assert {decision.choice for decision in manager.decisions if decision.status == "applied"} == set(expected.values())


def test_alike_sites_are_judged_as_one(clock: Callable[..., list[int]]) -> None:
    races = clock(lambda taken: 1.0 - 0.1 * len(taken))
    managed(Net(), Subtractions(kinds=True), time=True)
    # Before and the two lowerings; then the best one, each kind left out, and each kind with the other lowering.
    assert races[:2] == [3, 6]  # what follows is the same model on other sizes
    assert set(races[2:]) <= {2}


def test_a_slower_model_loses_all_that_was_decided_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_candidates(candidates: Mapping[str, timing.Runner], **options: object) -> Timings:
        whole = any(isinstance(run.module, Stack) for run in candidates.values())
        return Timings([{name: 1.0 if (name == "before") is whole else 2.0 for name in candidates}] * 20)

    monkeypatch.setattr(timing, "time_candidates", time_candidates)
    manager = manager_of(fxopt.capture(Stack(Net() for _ in range(3)), (X,)))
    before = {name: str(graph) for name, graph in manager.program.graphs.items()}
    manager.run([Subtractions(kinds=True)])
    assert [decision.status for decision in manager.decisions] == ["undone"] * 12
    assert {decision.reason for decision in manager.decisions} == {"the whole model was slower with it (0.5x)"}
    assert {name: str(graph) for name, graph in manager.program.graphs.items()} == before


def test_equal_blocks_follow_with_all_their_sites() -> None:
    manager = managed(Stack(Net() for _ in range(3)), Subtractions(unsuitable=(3.0,)))
    assert [rewrite.owner for rewrite in manager.rewrites] == ["blocks.0", "blocks.1", "blocks.2"]
    assert [decision.figures.get("as") for decision in manager.decisions if decision.label == "minus 1"] == [
        None, "minus 1 and 2 more", "minus 1 and 2 more",
    ]  # fmt: skip
    assert [decision.status for decision in manager.decisions].count("applied") == 9
    assert [decision.status for decision in manager.decisions].count("refused") == 3


@dataclasses.dataclass(frozen=True)
class Wider(Pass):
    """Write `sin` as something that raises when it runs, or as what it is."""

    goal: ClassVar[Goal] = Goal.SPEED

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for match in program.matches(operation("sin", name="sin")):
            yield match.site(choices=("raises", "works"))

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("sin")
        shape = (-7, 3) if site.choice == "raises" else (-1, 4)
        edit.replace(node, edit.call(torch.Tensor.reshape, edit.call(torch.sin, *node.args), shape))


@pytest.mark.parametrize("check", [True, False])
def test_a_candidate_that_raises_is_left_out_of_the_race(check: bool, clock: Callable[..., list[int]]) -> None:
    races = clock(lambda taken: 1.0)
    manager = managed(Net(), Wider(), time=True, check=check)
    (decision,) = manager.decisions
    assert (decision.status, decision.figures["lowerings"].keys()) == ("undone", {"works"})
    assert races == [2]


def test_a_candidate_that_raises_takes_no_time_of_the_next_one(
    monkeypatch: pytest.MonkeyPatch, clock: Callable[..., list[int]]
) -> None:
    monkeypatch.setattr(Comparison, "has_time_for_another", lambda self, written: False)
    races = clock(lambda taken: 1.0)
    managed(Net(), Wider(), time=True)
    assert races == [2]


def test_what_is_wrong_is_undone_though_it_won_the_race(clock: Callable[..., list[int]]) -> None:
    races = clock(lambda taken: 1.0 - 0.1 * len(taken))
    for pass_ in (OnlyFirst(wrong=(1.0,)), Subtractions(wrong=(1.0, 2.0, 3.0, 4.0))):
        found = managed(Net(), pass_, time=True)
        assert set(statuses(found).values()) == {"undone"}
        assert all("differs" in decision.reason for decision in found.decisions)
        assert races


@dataclasses.dataclass(frozen=True)
class OnlyFirst(Subtractions):
    def find(self, program: Program) -> Iterator[Site | Refusal]:
        yield next(super().find(program))


# -- the parts -----------------------------------------------------------------------------------------------------


def site(number: int, choices: tuple[str, ...] = ("wide", "bmm"), **options: object) -> Site:
    program = fxopt.capture(Net(), (X,))
    return Site(program, "", {"node": f"sub_{number}"}, choices=choices, **options)


def test_sites_are_grouped_where_the_first_of_them_was_found() -> None:
    sites = [site(0), site(1), site(2)]
    apart = dataclasses.replace(sites[1], owner="other")
    refusal = Refusal("no", at="here")
    found = grouped(Subtractions(), [sites[0], refusal, apart, sites[2]])
    assert found == [Group((sites[0], sites[2])), refusal, Group((apart,))]
    assert grouped(ByDesign(), sites) == [Group((each,)) for each in sites]


def test_a_lowering_that_a_site_does_not_have_is_its_first() -> None:
    part = site(0, ("bmm", "vmap"))
    assert with_lowering(part, "vmap").choice == "vmap"
    assert with_lowering(part, "wide").choice == "bmm"
    assert with_lowering(site(0, ()), "wide").choice is None


def test_many_kinds_are_judged_several_at_a_time() -> None:
    sites = [site(number) for number in range(20)]
    classes = Group(tuple(sites)).classes()
    assert len(classes) == 7
    assert [each for some in classes for each in some] == sites
    of_one_kind = Group(tuple(dataclasses.replace(each, kind="one") for each in sites))
    assert [len(some) for some in of_one_kind.classes()] == [20]

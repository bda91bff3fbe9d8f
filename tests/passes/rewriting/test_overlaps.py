"""Sites of one pass that overlap land one after another; an edit keeps the order of writes in place."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt import Edit, Goal, Pass, Plan, Program, Refusal, Site, anything, operation
from fxopt.errors import MatchFailure

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def optimized(model: nn.Module, passes: Any, **options: Any) -> Any:
    return fxopt.optimize(model, passes, **{"example_inputs": (X,), "measure": False, "time_budget": 600.0, **options})


def operations(model: nn.Module) -> list[str]:
    graph = fxopt.graphs(model)[""]
    return [node.name for node in graph.nodes if node.op not in ("placeholder", "output")]


def applied(model: nn.Module) -> int:
    return [decision.status for decision in fxopt.plan(model).decisions].count("applied")


@dataclasses.dataclass(frozen=True)
class DropOnes(Pass):
    """Drop multiplications by one; `by_hand` finds them without a pattern."""

    by_hand: bool = False
    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for match in program.matches(operation("mul", anything(name="x"), 1, name="product")):
            names = {name: node.name for name, node in match.nodes.items()}
            yield Site(program, match.owner, names) if self.by_hand else match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        edit.replace(site["product"], site["x"])


class Ones(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * 1 * 1 * 1)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_chain_of_overlapping_sites(by_hand: bool) -> None:
    fast = optimized(Ones(), DropOnes(by_hand))
    assert operations(fast) == ["sin"]
    assert applied(fast) == 3
    plan = Plan.from_json(json.loads(json.dumps(fxopt.plan(fast).to_json())))
    assert operations(optimized(Ones(), DropOnes(by_hand), plan=plan)) == ["sin"]


def test_what_would_return_the_argument_itself_stays() -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1 * 1

    fast = optimized(Bare(), DropOnes())
    assert len(operations(fast)) == 1
    assert torch.equal(fast(X), X)


@dataclasses.dataclass(frozen=True)
class FuseTwice(Pass):
    """Write `relu(relu(x))` as one clamp, though the chain may be longer."""

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        inner = operation("relu", anything(name="x"), name="inner")
        for match in program.matches(operation("relu", inner, name="outer")):
            yield match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        assert site["inner"].args[0] is site["x"], "this site is stale"
        assert "relu" in site["inner"].name
        edit.replace(site["outer"], edit.call(torch.clamp_min, site["x"], 0.0))


def test_a_site_whose_middle_is_gone_is_looked_for_again() -> None:
    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(torch.relu(torch.relu(torch.relu(x))))

    fast = optimized(Chain(), FuseTwice())
    assert operations(fast) == ["clamp_min", "clamp_min_1"]
    assert torch.equal(fast(X), torch.relu(X))
    statuses = {(d.status, d.reason) for d in fxopt.plan(fast).decisions}
    assert ("applied", "") in statuses
    assert all(status != "undone" for status, _ in statuses)
    again = optimized(Chain(), FuseTwice(), plan=fxopt.plan(fast))
    assert operations(again) == operations(fast)


# -- writes in place -------------------------------------------------------------------------------------------------


class Written(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        first = torch.sin(y)
        y.add_(1)
        return first + torch.cos(y)


def edit_of(model: nn.Module) -> tuple[Program, Edit, Callable[[str], Any]]:
    program = fxopt.capture(model, (X,))
    edit = Edit(program, Site(program, "", {}), "test_pass")
    return program, edit, lambda name: next(node for node in edit.graph.nodes if node.name == name)


def test_a_read_is_placed_behind_the_write_that_it_followed() -> None:
    """By default a new call stands right behind its operands: before the write."""
    model = Written()
    program, edit, node = edit_of(model)
    edit.replace(node("cos"), edit.call(torch.cos, node("add")))
    edit.finish()
    assert torch.equal(program.model(X), model(X))


def test_a_read_that_is_carried_over_a_write_is_refused() -> None:
    _, edit, node = edit_of(Written())
    early = edit.call(torch.add, edit.call(torch.cos, node("add")), 0.0)
    node("cos").replace_all_uses_with(early)
    early.meta["replaces"] = ("cos",)
    edit.erase(node("cos"))
    with pytest.raises(MatchFailure, match=r"in place \('add_'\) that the new code would read before the change"):
        edit.finish()


def test_a_node_that_is_moved_over_a_write_is_refused() -> None:
    _, edit, node = edit_of(Written())
    node("add_").append(node("sin"))
    with pytest.raises(MatchFailure, match=r"that the new code would read after the change \('sin'\)"):
        edit.finish()


def test_a_region_around_a_write_is_refused() -> None:
    _, edit, node = edit_of(Written())
    with pytest.raises(MatchFailure, match="would change their order"):
        edit.outline([node("sin"), node("cos")], name="part")


def test_edits_beside_a_write_are_as_before() -> None:
    class Beside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            y.add_(1)
            return torch.relu(x * 2) + y

    model = Beside()
    program, edit, node = edit_of(model)
    edit.outline([node("mul"), node("relu")], name="part")
    edit.finish()
    assert torch.equal(program.model(X), model(X))

"""Regions and other new children in modules that go through their children: these are no items of theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.runs import manager_of
from torch import Tensor, nn

import fxopt
from fxopt import Context, Edit, Goal, Numerics, OwnForward, Pass, Program, Refusal, Site
from fxopt.errors import GuardError, MatchFailure
from fxopt.runtime.graphs import misses_in

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class OutlineTwo(Pass):
    """Outline two calls of children in the module called `owner`."""

    owner: str = ""
    context: str = ""
    wrong: bool = False

    numerics: ClassVar[Numerics] = Numerics.EXACT
    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        nodes = list(program.graph(self.owner).nodes)
        first, second = [number for number, node in enumerate(nodes) if node.op == "call_module"][1:3]
        yield Site(program, self.owner, {f"part_{n}": node.name for n, node in enumerate(nodes[first : second + 1])})

    def rewrite(self, site: Site, edit: Edit) -> None:
        context = Context(self.context) if self.context else None
        call = edit.outline([site[label] for label in site.nodes], name="part", context=context)
        if self.wrong:
            edit.replace(call, call.args[0])


@dataclass(frozen=True)
class OutlineLeniently(OutlineTwo):
    """The same, where the original forward may run."""

    own_forward: ClassVar[OwnForward | None] = OwnForward.ACCEPTABLE


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU())


class Around(nn.Module):
    """Call a Sequential, and go through another one and through a list."""

    def __init__(self) -> None:
        super().__init__()
        self.body = sequential()
        self.loop = sequential()
        self.steps = nn.ModuleList(sequential())

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        for step in self.loop:
            x = step(x)
        for step in self.steps:
            x = step(x)
        return self.loop(x)


class Steps(nn.ModuleList):
    """A list with a forward."""

    def __init__(self) -> None:
        super().__init__(sequential())

    def forward(self, x: Tensor) -> Tensor:
        for index in range(len(self)):
            x = self[index](x)
        return x


class Dense(nn.ModuleDict):
    """A container with a forward, as in a DenseNet."""

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.values():
            found.append(layer(sum(found)))
        return found[-1]


class Walker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number, child in enumerate(sequential()):
            self.add_module(f"child_{number}", child)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "the root": (sequential, ""),
    "a child": (lambda: nn.ModuleDict({"m": sequential()})["m"], ""),
    "called": (Around, "body"),
    "called and gone through": (Around, "loop"),
    "around containers": (Around, ""),
    "beside its items": (Steps, ""),
    "a dictionary": (lambda: Dense({str(n): child for n, child in enumerate(sequential())}), ""),
}


def optimized(model: nn.Module, pass_: Pass, **options: Any) -> Any:
    return fxopt.optimize(model, pass_, example_inputs=(X,), measure=False, time_budget=600.0, **options)


@pytest.mark.parametrize("context", ["", "checkpoint"])
@pytest.mark.parametrize("case", MODELS)
def test_a_region_in_a_container(case: str, context: str) -> None:
    make, owner = MODELS[case]
    model = make()
    fast = optimized(model, OutlineTwo(owner, context))
    assert [(d.status, d.reason) for d in fxopt.plan(fast).decisions] == [("applied", "")]
    assert "part" in fxopt.graphs(fast)[owner].find_nodes(op="call_module")[1].target
    torch.testing.assert_close(fast(X), model(X))
    assert misses_in(fast.modules()) == []
    before, after = model.get_submodule(owner), fast.get_submodule(owner)
    if isinstance(before, (nn.Sequential, nn.ModuleDict)):
        assert len(after) == len(before)
        assert [type(each) for each in after] == [type(each) for each in before]
    assert list(fast.state_dict()) == list(model.state_dict())
    fast.load_state_dict(model.state_dict())
    assert not fast.eval().get_submodule(owner).part.training
    assert misses_in(optimized(fast, OutlineTwo(owner, context)).modules()) == []
    twin = copy.deepcopy(fast)
    torch.testing.assert_close(twin(X), model(X))
    restored = fxopt.restore(fast)
    assert [type(each) for each in restored.modules()] == [type(each) for each in model.modules()]
    assert torch.equal(restored(X), model(X))


def test_indexing_and_iterating_find_the_items_alone() -> None:
    model = sequential()
    fast = optimized(model, OutlineTwo(), inplace=False)
    assert fast[-1] is fast[3]
    assert [type(each).__name__ for each in fast[2:]] == ["Linear", "ReLU"]
    assert type(fast[2:]) is nn.Sequential
    assert [type(each).__name__ for each in fast + nn.Sequential(nn.Tanh())][-1] == "Tanh"
    with pytest.raises(IndexError):
        fast[4]
    named = optimized(MODELS["a dictionary"][0](), OutlineTwo())
    assert (list(named.keys()), "part" in named, "0" in named) == (["0", "1", "2", "3"], False, True)
    assert [type(each).__name__ for each in named.values()] == ["Linear", "Tanh", "Linear", "ReLU"]


CHANGES: dict[str, Callable[[Any], object]] = {
    "append": lambda model: model.append(nn.Tanh()),
    "insert": lambda model: model.insert(1, nn.Tanh()),
    "pop": lambda model: model.pop(0),
    "delete": lambda model: model.__delitem__(1),
    "extend": lambda model: model.extend([nn.Tanh()]),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_container_is_changed_as_if_nothing_had_been_added(case: str) -> None:
    model = sequential()
    fast, strict = optimized(model, OutlineLeniently()), optimized(model, OutlineTwo())
    for each in (model, fast, strict):
        CHANGES[case](each)
    assert list(fast.state_dict()) == list(model.state_dict())
    with pytest.warns(fxopt.GuardWarning):
        assert torch.equal(fast(X), model(X))
    with pytest.raises(GuardError, match="it would leave out the region 'part'"):
        strict(X)


def test_a_wrong_region_in_a_sequential_goes_again_without_a_rest() -> None:
    program = fxopt.capture(sequential(), (X,))
    before = [(name, id(module), type(module)) for name, module in program.model.named_modules()]
    manager = manager_of(program, time=False)
    manager.run([OutlineTwo(wrong=True)])
    assert {decision.status for decision in manager.decisions} == {"undone"}
    assert [(name, id(module), type(module)) for name, module in program.model.named_modules()] == before
    assert torch.equal(program.model(X), sequential()(X))


def test_an_archive_of_a_region_in_a_sequential(tmp_path: Path) -> None:
    model = sequential()
    fast = optimized(model, OutlineTwo(context="checkpoint"))
    torch.save(fast, tmp_path / "whole.pt")
    again = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert (len(again), misses_in(again.modules())) == (4, [])
    assert torch.equal(again(X), model(X))


def test_a_child_that_is_added_to_a_sequential_is_no_item() -> None:
    @dataclass(frozen=True)
    class AddChild(OutlineTwo):
        def rewrite(self, site: Site, edit: Edit) -> None:
            node = site["part_0"]
            edit.replace(node, edit.call(edit.add_module(nn.Tanh(), name="tanh"), node.args[0]))

    fast = optimized(sequential(), AddChild())
    assert [(d.status, d.reason) for d in fxopt.plan(fast).decisions] == [("applied", "")]
    assert len(fast) == 4
    torch.testing.assert_close(fast(X), sequential()(X))
    with pytest.warns(fxopt.GuardWarning):  # the original forward does not come across it either
        torch.testing.assert_close(fast.append(nn.Identity())(X), sequential()(X))


def test_a_forward_that_goes_through_the_registry_does_not_come_across_a_region() -> None:
    fast = optimized(Walker(), OutlineTwo())
    (decision,) = fxopt.plan(fast).decisions
    assert decision.status == "applied"
    assert [name for name, _ in fast.named_children()] == [name for name, _ in Walker().named_children()]
    program = fxopt.capture(Walker(), (X,))
    edit = Edit(program, Site(program, "", {}), "test_pass")
    called = [node for node in edit.graph.nodes if node.op == "call_module"]
    with pytest.raises(MatchFailure, match="would come across 'part'"):
        edit.outline(called, name="part", wrapper=lambda region: nn.Sequential(region))

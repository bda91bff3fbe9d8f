"""What is undone leaves nothing behind: neither what the edit knows of nor what a pass's code did beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from support.runs import manager_of
from support.subtractions import Subtractions
from torch import Tensor, fx, nn

import fxopt
from fxopt.errors import PlanError
from fxopt.passes.rewriting import Edit
from fxopt.passes.sites import Phase, Refusal, Site
from fxopt.runtime.graphs import Context, ContextRegion, add_region
from fxopt.tracing.program import Program

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.names = ["a"]

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.norm(self.body(x))) - x


@dataclasses.dataclass(frozen=True)
class Wrong(Subtractions):
    """Make the subtraction wrong, and do something beside it."""

    def replacement(self, site: Site, edit: Edit, node: fx.Node) -> fx.Node:
        self.meddle(edit)
        return edit.call(torch.add, *node.args)

    def meddle(self, edit: Edit) -> None:
        """Change what the edit does not know of."""


class Meddlers:
    class Order(Wrong):
        def meddle(self, edit: Edit) -> None:
            children = edit.owner.get_submodule("body")._modules
            children["0"] = children.pop("0")

    class Attribute(Wrong):
        def meddle(self, edit: Edit) -> None:
            vars(edit.owner)["extra"] = 1

    class Container(Wrong):
        def meddle(self, edit: Edit) -> None:
            edit.owner.names.append("b")

    class Hook(Wrong):
        def meddle(self, edit: Edit) -> None:
            edit.owner.get_submodule("body.0").register_forward_hook(lambda *_: None)

    class Mode(Wrong):
        def meddle(self, edit: Edit) -> None:
            edit.owner.get_submodule("norm").training ^= True

    class Frozen(Wrong):
        def meddle(self, edit: Edit) -> None:
            edit.owner.get_submodule("body").requires_grad_(False)

    class Gradient(Wrong):
        def meddle(self, edit: Edit) -> None:
            edit.owner.get_submodule("norm").weight.grad = torch.ones(4)

    class Class(Wrong):
        def meddle(self, edit: Edit) -> None:
            edit.owner.get_submodule("body.1").__class__ = nn.Sigmoid

    class RegionInSequential(Wrong):
        def meddle(self, edit: Edit) -> None:
            body = edit.owner.get_submodule("body")
            add_region(body, "region", ContextRegion(Context("no_grad"), body, ()))


MEDDLERS = [kind for name, kind in vars(Meddlers).items() if not name.startswith("_")]


def trace_of(model: nn.Module) -> Any:
    """Return what a model is: modules, their order, classes, attributes, hooks and flags; tensors and their flags."""
    registered = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return (
        {name: _belongings(module) for name, module in model.named_modules(remove_duplicate=False)},
        {name: (id(t), t.tolist(), t.requires_grad, t.grad is None) for name, t in registered},
    )


def _belongings(module: nn.Module) -> Any:
    registries = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    plain = {n: repr(v) for n, v in vars(module).items() if n not in registries and not n.startswith("_fxopt")}
    return type(module), plain, [list(vars(module)[name]) for name in registries]


@pytest.mark.parametrize("kind", MEDDLERS)
def test_what_a_pass_did_beside_its_edit_is_undone_with_it(kind: type[Wrong]) -> None:
    program = fxopt.capture(Net(), (X,))
    before, text = trace_of(program.model), {name: str(graph) for name, graph in program.graphs.items()}
    manager = manager_of(program, time=False)
    manager.run([kind()])
    assert {decision.status for decision in manager.decisions} <= {"undone", "refused"} and manager.decisions
    assert trace_of(program.model) == before
    assert {name: str(graph) for name, graph in program.graphs.items()} == text


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_a_pass_that_stops_half_way_leaves_nothing_behind(stop: type[BaseException]) -> None:
    class Stops(Meddlers.Container):
        def meddle(self, edit: Edit) -> None:
            edit.add_module(nn.Linear(4, 4), name="new")
            super().meddle(edit)
            raise stop

    program = fxopt.capture(Net(), (X,))
    before = trace_of(program.model)
    with pytest.raises(KeyboardInterrupt if stop is KeyboardInterrupt else fxopt.PassError):
        manager_of(program, time=False).run([Stops()])
    assert trace_of(program.model) == before


def test_switches_that_a_pass_leaves_turned_are_turned_back() -> None:
    class Turns(Wrong):
        def find(self, program: Program) -> Iterator[Site | Refusal]:
            torch.set_grad_enabled(False)
            torch.set_default_dtype(torch.float64)
            return super().find(program)

        def meddle(self, edit: Edit) -> None:
            torch.manual_seed(7)
            torch.set_grad_enabled(False)

    model = Net()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    fxopt.optimize(model, [Turns()], example_inputs=(X,), measure=False)
    assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32
    assert torch.equal(torch.rand(3), expected)


def test_the_nodes_of_a_site_are_those_of_the_graph_being_edited() -> None:
    class Swaps(Wrong):
        def rewrite(self, site: Site, edit: Edit) -> None:
            node = site["sub"]
            assert node.graph is edit.graph is site.graph
            node.args = node.args[::-1]

    program = fxopt.capture(Net(), (X,))
    before = {name: str(graph) for name, graph in program.graphs.items()}
    manager = manager_of(program, time=False)
    manager.run([Swaps()])
    assert [decision.status for decision in manager.decisions] == ["undone"]
    assert {name: str(graph) for name, graph in program.graphs.items()} == before


# -- passes for evaluation -----------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(), Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


class ForEvaluation(Wrong):
    """Write the subtraction as a function, for evaluation."""

    phase: ClassVar[Phase] = Phase.EVAL

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("sub")
        edit.replace(node, edit.call(torch.sub, *node.args))


def test_a_pass_for_evaluation_lands_where_the_modules_are_in_evaluation() -> None:
    model = Pair()
    model.second.eval()
    fast = fxopt.optimize(model, [ForEvaluation()], example_inputs=(X,))
    found = {d.key.partition(":")[0]: (d.status, d.reason) for d in fxopt.plan(fast).decisions}
    reason = "it is for evaluation, and the model is in training; call model.eval() first"
    assert found["first"] == ("refused", reason)
    assert found["second"] == ("applied", "")
    assert fast.training and fast.first.training and not fast.second.training
    with pytest.raises(fxopt.ModeError, match="for_evaluation"):
        fast.second.train()


def test_a_plan_for_evaluation_is_not_replayed_in_training() -> None:
    plan = fxopt.plan(fxopt.optimize(Net().eval(), [ForEvaluation()], example_inputs=(X,)))
    model = Net()
    with pytest.raises(PlanError, match=r"are for evaluation; call model.eval\(\) first"):
        fxopt.optimize(model, [ForEvaluation()], plan=plan)
    assert model.training
    assert not fxopt.optimize(model.eval(), [ForEvaluation()], plan=plan).training

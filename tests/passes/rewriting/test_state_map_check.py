"""Tensors that a pass adds, changes or takes away without a step: refused at the site, the model stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, fx, nn

import fxopt
from fxopt import Edit, Goal, Pass, Program, Refusal, Site
from fxopt.errors import MatchFailure
from fxopt.passes.rewriting.state_map_check import check_mapped
from fxopt.runtime.state import Rename, StateMap


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)))


def inputs() -> tuple[Tensor]:
    return (torch.linspace(-1, 1, 12).view(3, 4),)


@dataclass(frozen=True)
class Change(Pass):
    """Do something to the linear 'two'."""

    what: Callable[[Site, Edit], None]

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        yield Site(program, "", {"two": "two"})

    def rewrite(self, site: Site, edit: Edit) -> None:
        self.what(site, edit)


def add_module(site: Site, edit: Edit) -> None:
    name = edit.add_module(site.module("two"), name="again")
    edit.replace(site["two"], edit.call(name, *site["two"].args, before=site["two"]))


def remove_module(site: Site, edit: Edit) -> None:
    weight, bias = (tensor.detach() for tensor in site.module("two").parameters())
    names = [edit.add_constant(tensor, name="kept") for tensor in (weight, bias)]
    tensors = [edit.get_attr(name, before=site["two"]) for name in names]
    x = site["two"].args[0]
    edit.replace(site["two"], edit.call(torch.nn.functional.linear, x, *tensors, before=site["two"]))
    edit.remove_module("two")


class Padded(nn.Linear):
    """A linear with two columns more, which it does not use."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(4, 6)
        self.weight = nn.Parameter(torch.cat([linear.weight.detach(), torch.zeros(2, 4)]))
        self.bias = nn.Parameter(torch.cat([linear.bias.detach(), torch.zeros(2)]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., :4]


def other_shape(site: Site, edit: Edit) -> None:
    edit.replace_module("two", Padded(edit.owner.get_submodule("two")))  # pyright: ignore[reportArgumentType]


REFUSED: dict[str, tuple[Callable[[Site, Edit], None], str]] = {
    "added": (add_module, "the pass adds 'again.weight', and no step says what it is in a checkpoint"),
    "taken away": (remove_module, "the pass takes 'two.weight' away, and no step says what became of it"),
    "another shape": (other_shape, "gives 'two.weight' the shape [6, 4] instead of [4, 4], and no step says how"),
}


@pytest.mark.parametrize(("what", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_at_the_site(what: Callable[[Site, Edit], None], reason: str):
    model = Net()
    fast = fxopt.optimize(model, Change(what), example_inputs=inputs())
    (decision,) = fxopt.plan(fast).decisions
    assert decision.status != "applied"
    assert reason in decision.reason
    assert fast.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(fast(*inputs()), model(*inputs()))


def test_a_step_accounts_for_it():
    shapes = {name: tensor.shape for name, tensor in Net().state_dict().items()}
    renamed = {name.replace("two.weight", "again"): shape for name, shape in shapes.items()}
    check_mapped(shapes, renamed, StateMap((Rename("two.weight", "again"),)))
    with pytest.raises(MatchFailure, match=r"the pass adds 'again'"):
        check_mapped(shapes, renamed, StateMap())


def test_a_function_that_adds_parameters_is_refused():
    def add_layer(graph_module: fx.GraphModule) -> fx.GraphModule:
        """Put a layer that changes nothing yet behind the output."""
        added = nn.Linear(4, 4)
        nn.init.eye_(added.weight)
        nn.init.zeros_(added.bias)
        graph_module.add_module("added", added)
        output = graph_module.graph.output_node()
        with graph_module.graph.inserting_before(output):
            call = graph_module.graph.call_module("added", output.args)
        output.args = (call,)
        return graph_module

    fast = fxopt.optimize(Net(), add_layer, example_inputs=inputs())
    (decision,) = fxopt.plan(fast).decisions
    assert decision.status != "applied"
    assert "the pass adds 'added.weight'" in decision.reason


def test_what_an_earlier_pass_added_stays():
    shapes = {"one.weight": torch.Size([4, 4])}
    with pytest.raises(MatchFailure, match="an earlier pass made 'new', and no checkpoint from before"):
        check_mapped(shapes, shapes, StateMap((Rename("new.weight", "newer"),)), ["new.weight"])
    with pytest.raises(MatchFailure, match="an earlier pass made 'new'"):
        check_mapped(shapes, {**shapes, "new.counter": torch.Size([])}, StateMap(), ["new.weight"])

"""What a pass changes behind the back of its edit is found, put back, and said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt import Edit, Goal, Pass, Program, Refusal, Site
from fxopt.errors import PassError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.scale = 3
        self.sizes = [1, 2]

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x)) * 2.0


@dataclass(frozen=True)
class DoubleByAdding(Pass):
    """Write `x * 2` as `x + x`, and do something else beside."""

    beside: Callable[[Any, Program], object]
    in_find: bool = False

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        if self.in_find:
            self.beside(program.model, program)
        yield Site(program, "", {"product": "mul"})

    def rewrite(self, site: Site, edit: Edit) -> None:
        product = site["product"]
        edit.replace(product, edit.call(torch.add, product.args[0], product.args[0], before=product))
        if not self.in_find:
            self.beside(edit.owner, edit.program)


def write_past_the_count(model: Any, program: Program) -> None:
    model.body[0].weight.data.mul_(2)


def write_in_place(model: Any, program: Program) -> None:
    nn.init.zeros_(model.body[3].bias)


def write_a_buffer(model: Any, program: Program) -> None:
    model.body[1].running_mean.add_(1)


def other_data(model: Any, program: Program) -> None:
    model.body[0].weight.data = torch.zeros(8, 4)


def other_parameter(model: Any, program: Program) -> None:
    model.body[0].weight = nn.Parameter(torch.zeros(8, 4))


def new_attribute(model: Any, program: Program) -> None:
    model.body.extra = 3


def other_attribute(model: Any, program: Program) -> None:
    model.scale = 4


def longer_list(model: Any, program: Program) -> None:
    model.sizes.append(3)


def other_child(model: Any, program: Program) -> None:
    model.body[2] = nn.GELU()


def new_child(model: Any, program: Program) -> None:
    model.body.append(nn.GELU())


def other_graph(model: Any, program: Program) -> None:
    graph = program.graph("body")
    node = graph.find_nodes(op="call_module", target="2")[0]
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


CHANGES = {
    write_past_the_count: ("wrote into 'body.0.weight'", "edit.set_tensor"),
    write_in_place: ("wrote into 'body.3.bias'", "edit.set_tensor"),
    write_a_buffer: ("wrote into 'body.1.running_mean'", "edit.set_tensor"),
    other_data: ("wrote into 'body.0.weight'", "edit.set_tensor"),
    other_parameter: ("put another tensor in the place of the parameter 'body.0.weight'", "edit.set_tensor"),
    new_attribute: ("set the attribute 'body.extra'", "edit.set_attribute"),
    other_attribute: ("set the attribute 'scale'", "edit.set_attribute"),
    longer_list: ("changed what is in 'sizes'", "edit.set_attribute"),
    other_child: ("put another module in the place of 'body.2'", "edit.replace_module"),
    new_child: ("put another module in the place of 'body.4'", "edit.add_module"),
    other_graph: ("changed the graph of 'body' itself", "edit.graph"),
}


def state_of(model: nn.Module) -> object:
    """Return everything that must be as it was, but the tensors' values."""
    modules = dict(model.named_modules())
    attributes = {n: {k: repr(v) for k, v in vars(m).items() if not k.startswith("_")} for n, m in modules.items()}
    return attributes, {name: type(module).__name__ for name, module in modules.items()}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_in_rewrite_fails_the_site_and_is_put_back(change: Callable[[Any, Program], object]) -> None:
    model = Net().eval()
    expected, before = model(X), state_of(model)
    fast = fxopt.optimize(model, DoubleByAdding(change), example_inputs=(X,), measure=False, time_budget=600.0)
    (decision,) = fxopt.plan(fast).decisions
    what, instead = CHANGES[change]
    assert decision.status != "applied"
    assert f"the pass {what}" in decision.reason
    assert instead in decision.reason
    assert torch.equal(fast(X), expected)
    assert state_of(fast) == before
    assert all(torch.equal(a, b) for a, b in zip(fast.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("change", [c for c in CHANGES if c is not write_a_buffer], ids=lambda change: change.__name__)
def test_a_change_in_find_is_an_error(change: Callable[[Any, Program], object]) -> None:
    model = Net().eval()
    expected = model(X)
    with pytest.raises(PassError, match="find must change nothing, but it") as raised:
        fxopt.optimize(
            model, DoubleByAdding(change, in_find=True), example_inputs=(X,), measure=False, time_budget=600.0
        )
    assert CHANGES[change][0] in str(raised.value)
    assert torch.equal(model(X), expected)


def test_nothing_is_found_where_nothing_else_was_changed() -> None:
    model = Net().eval()
    fast = fxopt.optimize(
        model, DoubleByAdding(lambda model, program: None), example_inputs=(X,), measure=False, time_budget=600.0
    )
    assert [d.status for d in fxopt.plan(fast).decisions] == ["applied"]


def test_a_pass_that_raises_leaves_nothing_behind() -> None:
    def change_and_raise(model: Any, program: Program) -> None:
        write_in_place(model, program)
        raise ValueError("no")

    program = fxopt.capture(Net().eval(), (X,))
    expected = program.model(X)
    edit = Edit(program, Site(program, "", {"product": "mul"}), "test_pass")
    with pytest.raises(ValueError, match="no"), edit.watched():
        change_and_raise(edit.owner, program)
    assert torch.equal(program.model(X), expected)


def test_a_site_hands_out_nodes_of_the_copy_that_is_edited() -> None:
    """A rewrite that only uses `site[...]` does not reach the graph that was there before."""
    program = fxopt.capture(Net().eval(), (X,))
    before = program.graphs[""]
    text = str(before)
    site = Site(program, "", {"product": "mul"})
    edit = Edit(program, site, "test_pass")
    product = site.read_through(edit.own_graphs)["product"]
    assert product.graph is edit.graph
    assert product.graph is not before
    edit.replace(product, edit.call(torch.add, product.args[0], product.args[0], before=product))
    assert str(before) == text
    edit.undo()
    assert program.graphs[""] is before

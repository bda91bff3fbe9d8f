"""Edit: rewrites land whole, know where they came from, and are undone without a trace."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxopt
from fxopt.errors import CaptureError, PassError
from fxopt.passes.rewriting import Edit
from fxopt.passes.sites import Site
from fxopt.runtime.state import Rename
from fxopt.tracing.program import Program


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 3)
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x)))) + self.offset


class Outer(nn.Module):
    """Two equal blocks, whose captures may be shared."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def program() -> Program:
    return fxopt.capture(Net(), (torch.randn(5, 4),))


def edit_of(program: Program, owner: str = "", **nodes: str) -> Edit:
    return Edit(program, Site(program, owner, nodes), "test_pass")


def trace_of(program: Program) -> object:
    """Return everything that undoing must bring back."""
    modules = dict(program.model.named_modules())
    return (
        {name: str(graph) for name, graph in program.graphs.items()},
        {name: (id(module), type(module)) for name, module in modules.items()},
        [list(vars(module)) for module in modules.values()],
        list(program.model.state_dict()),
        {name: id(tensor) for name, tensor in program.model.named_parameters()},
    )


def add_identity(edit: Edit) -> None:
    name = edit.add_module(nn.Identity(), name="first")
    relu = edit.graph_node("relu")
    called = edit.call(name, relu.args[0])
    relu.replace_input_with(relu.all_input_nodes[0], called)


def replace_relu(edit: Edit) -> None:
    node = edit.graph_node("relu")
    edit.replace(node, edit.call(torch.nn.functional.relu, node.args[0]))


def remove_first(edit: Edit) -> None:
    relu = edit.graph_node("relu")
    relu.replace_input_with(relu.all_input_nodes[0], edit.call(torch.sin, next(iter(edit.graph.nodes))))
    edit.erase(next(node for node in edit.graph.nodes if node.target == "first"))
    edit.remove_module("first")


def add_constant(edit: Edit) -> None:
    name = edit.add_constant(torch.full((3,), 2.0), name="offset")
    node = next(node for node in edit.graph.nodes if node.target == "offset")
    edit.replace(node, edit.get_attr(name, before=node))


def own_graph(edit: Edit) -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.sin, (graph.placeholder("x"),)))
    edit.set_graph(graph)


CHANGES = [add_identity, replace_relu, remove_first, add_constant, own_graph]


@pytest.mark.parametrize("change", CHANGES)
def test_undoing_leaves_no_trace(program: Program, change: Callable[[Edit], None]) -> None:
    x = torch.randn(5, 4)
    before, expected = trace_of(program), program.model(x)
    edit = edit_of(program, relu="relu")
    change(edit)
    edit.finish()
    program.model(x)
    assert trace_of(program) != before
    edit.undo()
    assert trace_of(program) == before
    assert torch.equal(program.model(x), expected)


def test_the_order_of_children_comes_back(program: Program) -> None:
    edit = edit_of(program)
    edit.remove_module("first")
    edit.undo()
    assert [name for name, _ in program.model.named_children()] == ["first", "second"]


def test_taken_names_are_numbered(program: Program) -> None:
    edit = edit_of(program)
    assert edit.add_module(nn.Identity(), name="first") == "first_1"
    assert edit.add_module(nn.Identity(), name="first") == "first_2"
    assert edit.add_constant(torch.ones(1), name="offset") == "offset_1"
    assert edit.add_module(nn.Identity(), name="new") == "new"


def test_new_modules_are_in_the_owner_s_mode() -> None:
    program = fxopt.capture(Net().eval(), (torch.randn(5, 4),))
    edit = edit_of(program)
    assert not program.model.get_submodule(edit.add_module(nn.Dropout(), name="dropout")).training


def test_new_nodes_know_who_made_them(program: Program) -> None:
    edit = edit_of(program, relu="relu")
    replace_relu(edit)
    made = [node for node in edit.graph.nodes if "provenance" in node.meta]
    assert [node.target for node in made] == [torch.nn.functional.relu]
    assert made[0].meta["provenance"] == ("test_pass", edit.site.key)
    assert made[0].meta["val"].shape == (5, 4)


def test_calls_stand_behind_their_operands(program: Program) -> None:
    edit = edit_of(program)
    nodes = {node.name: node for node in edit.graph.nodes}
    made = edit.call(torch.add, nodes["second"], nodes["first"])
    assert made.prev is nodes["second"]
    method = edit.call(".sum", made, -1, keepdim=True)
    assert (method.op, method.target, method.args, method.kwargs) == (
        "call_method",
        "sum",
        (made, -1),
        {"keepdim": True},
    )
    assert edit.call(torch.ones, 2).prev.op == "placeholder"


def test_erasing_takes_what_only_it_needed(program: Program) -> None:
    edit = edit_of(program)
    nodes = {node.name: node for node in edit.graph.nodes}
    edit.graph.output_node().args = (nodes["first"],)
    edit.erase(nodes["add"])
    assert [node.name for node in edit.graph.nodes] == ["x", "first", "output"]


def test_erasing_keeps_what_has_effects() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.count.add_(1)

    program = fxopt.capture(Counting(), (torch.randn(2),))
    edit = edit_of(program)
    nodes = list(edit.graph.nodes)
    edit.graph.output_node().args = (nodes[0],)
    edit.erase(next(node for node in nodes if node.target is operator.add))
    assert "add_" in [node.target for node in edit.graph.nodes]


def test_erasing_long_chains() -> None:
    class Deep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x
            for _ in range(3000):
                y = y + 1
            return x, y

    program = fxopt.capture(Deep(), (torch.zeros(()),))
    edit = edit_of(program)
    output = edit.graph.output_node()
    first, last = output.all_input_nodes
    output.args = (first,)
    edit.erase(last)
    assert len(edit.graph.nodes) == 2


def test_blocks_that_share_graphs_are_edited_one_by_one() -> None:
    program = fxopt.capture(Outer(), (torch.randn(5, 4),))
    before = str(program.graph("blocks.1"))
    edit = edit_of(program, "blocks.0")
    node = next(node for node in edit.graph.nodes if node.target == "1")
    edit.replace(node, edit.call(torch.sigmoid, node.args[0]))
    edit.finish()
    assert str(program.graph("blocks.1")) == before != str(program.graph("blocks.0"))
    x = torch.randn(5, 4)
    blocks = program.model.blocks
    assert torch.equal(program.model(x), torch.relu(blocks[1][0](torch.sigmoid(blocks[0][0](x)))))


def _unknown_module(edit: Edit) -> None:
    edit.graph_node("relu").replace_all_uses_with(edit.call("nowhere", edit.graph_node("relu")))


def _unknown_attribute(edit: Edit) -> None:
    edit.graph_node("relu").replace_all_uses_with(edit.get_attr("nowhere", before=edit.graph_node("relu")))


def _wrong_order(edit: Edit) -> None:
    nodes = list(edit.graph.nodes)
    nodes[-2].append(nodes[1])


def _foreign_node(edit: Edit) -> None:
    edit.graph_node("relu").args = (fx.Graph().placeholder("x"),)


def _other_inputs(edit: Edit) -> None:
    with edit.graph.inserting_before(next(iter(edit.graph.nodes))):
        edit.graph.placeholder("y")


@pytest.mark.parametrize("change", [_unknown_module, _unknown_attribute, _wrong_order, _foreign_node, _other_inputs])
def test_malformed_graphs_are_refused(program: Program, change: Callable[[Edit], None]) -> None:
    x, before = torch.randn(5, 4), trace_of(program)
    expected = program.model(x)
    edit = edit_of(program, relu="relu")
    change(edit)
    with pytest.raises(CaptureError, match="malformed"):
        edit.finish()
    edit.undo()
    assert trace_of(program) == before
    assert torch.equal(program.model(x), expected)


def test_state_steps_add_up_and_are_undone(program: Program) -> None:
    edit = edit_of(program)
    edit.record_state(Rename("first.weight", "a"))
    edit.record_state(Rename("a", "b"))
    assert list(edit.state_map().forward({"first.weight": torch.ones(1)}, strict=False)) == ["b"]
    edit.undo()
    assert edit.state_map().steps == ()


@pytest.mark.parametrize(("names", "what"), [((("a",), ()), "drops what it takes"), (((), ("a",)), "from nothing")])
def test_a_state_step_has_old_and_new_names(program: Program, names: Any, what: str) -> None:
    edit = edit_of(program)
    step = type("Step", (Rename,), {"sources": names[0], "targets": names[1]})("a", "b")
    with pytest.raises(PassError, match=what):
        edit.record_state(step)
    assert edit.state_map().steps == ()


def test_what_others_changed_is_undone_in_turn(program: Program) -> None:
    order: list[str] = []
    edit = edit_of(program)
    edit.on_undo(lambda: order.append("first"))
    edit.on_undo(lambda: order.append("second"))
    edit.undo()
    edit.undo()
    assert order == ["second", "first"]


def test_the_graph_before_is_remembered(program: Program) -> None:
    text = str(program.graph(""))
    edit = edit_of(program, relu="relu")
    assert edit.graphs_before() == {}
    replace_relu(edit)
    edit.finish()
    assert {name: str(graph) for name, graph in edit.graphs_before().items()} == {"": text}


def test_a_module_without_a_graph_cannot_be_edited(program: Program) -> None:
    with pytest.raises(CaptureError, match="'first' has no graph"):
        _ = edit_of(program, "first").graph


def test_sites_name_their_nodes(program: Program) -> None:
    site = Site(program, "", {"a": "first", "b": "relu"})
    assert site["b"].name == "relu"
    assert site.module("a") is program.model.first
    assert site.key == "(root):first..relu(2)"
    assert Site(program, "first", {}).key == "first"
    assert dataclasses.replace(site, specialization=1, nodes={"a": "x"}).key == "(root)#1:x"
    with pytest.raises(CaptureError, match="no node 'firts'; did you mean 'first'"):
        _ = Site(program, "", {"a": "firts"})["a"]

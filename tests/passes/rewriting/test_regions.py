"""Regions: outlining and inlining change where nodes run, and nothing else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.compat import all_modules
from fxopt.errors import MatchFailure
from fxopt.passes.contract import Pass
from fxopt.passes.rewriting import Edit
from fxopt.passes.sites import Goal, Numerics, Site
from fxopt.runtime.graphs import Region
from fxopt.runtime.guards import require
from fxopt.tracing.program import Program, TensorOwners


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return x + self.mlp(hidden) * self.scale + self.offset * hidden


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.shared = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a = self.shared(x)
        b = self.shared(self.block(a) + y)
        return a * b, b.sum(-1)


INPUTS = tuple(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)))


@pytest.fixture
def program() -> Program:
    return fxopt.capture(Net(), INPUTS)


def outlined(program: Program, owner: str, *names: str, name: str = "region") -> Edit:
    edit = Edit(program, Site(program, owner, {}), "test_pass")
    edit.outline([node for node in edit.graph.nodes if node.name in names], name=name)
    edit.finish()
    return edit


def run(model: nn.Module) -> list[Tensor]:
    """Return outputs and gradients."""
    inputs = [tensor.clone().requires_grad_() for tensor in INPUTS]
    outputs = model(*inputs)
    torch.stack([output.sin().sum() for output in outputs]).sum().backward()
    gradients = [tensor.grad for tensor in (*inputs, *model.parameters())]
    model.zero_grad()
    return [*outputs, *gradients]


def assert_same(given: list[Tensor], expected: list[Tensor]) -> None:
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        assert torch.equal(one, other)


REGIONS = {
    "several inputs and outputs": ("", ["block", "add", "shared_1"]),
    "a shared child, called inside and outside": ("", ["shared_1", "sum_1"]),
    "tensors of the owner": ("block", ["mlp", "mul", "add", "mul_1", "add_1"]),
    "one node": ("block", ["norm"]),
    "everything": ("", ["shared", "block", "add", "shared_1", "mul", "sum_1"]),
    "unconnected nodes": ("", ["mul", "sum_1"]),
}


@pytest.mark.parametrize("case", REGIONS)
def test_there_and_back(program: Program, case: str) -> None:
    owner, names = REGIONS[case]
    expected, state = run(program.model), list(program.model.state_dict())
    edit = outlined(program, owner, *names)
    text = str(program.graph(owner))
    assert_same(run(program.model), expected)
    assert list(program.model.state_dict()) == state
    call = next(node for node in edit.graph.nodes if node.target == "region")
    edit.inline(call)
    edit.finish()
    assert_same(run(program.model), expected)
    assert list(program.model.state_dict()) == state
    assert not any(isinstance(module, Region) for module in all_modules(program.model))
    assert str(program.graph(owner)) != text
    for graph in program.graphs.values():
        graph.lint()


@pytest.mark.parametrize("case", REGIONS)
def test_undone(program: Program, case: str) -> None:
    owner, names = REGIONS[case]
    before, expected = {name: str(graph) for name, graph in program.graphs.items()}, run(program.model)
    outlined(program, owner, *names).undo()
    assert {name: str(graph) for name, graph in program.graphs.items()} == before
    assert_same(run(program.model), expected)


def test_the_region_s_graph(program: Program) -> None:
    outlined(program, "block", "mlp", "mul", "add")
    assert [(node.op, node.name) for node in program.graph("block.region").nodes] == [
        ("placeholder", "norm"),
        ("placeholder", "scale"),
        ("placeholder", "x"),
        ("call_module", "mlp"),
        ("call_function", "mul"),
        ("call_function", "add"),
        ("output", "output"),
    ]
    region = program.module("block.region")
    assert region.mlp is program.model.block.mlp
    assert [node.meta["val"].shape for node in program.graph("block").nodes if node.target == "region"] == [(3, 4)]


@pytest.mark.parametrize("names", [["shared", "shared_1"], ["block", "mul"]])
def test_what_cannot_run_as_one_is_refused(program: Program, names: list[str]) -> None:
    before = str(program.graph(""))
    edit = Edit(program, Site(program, "", {}), "test_pass")
    nodes = [node for node in edit.graph.nodes if node.name in names]
    with pytest.raises(MatchFailure, match="computed outside the region from a value inside it"):
        edit.outline(nodes, name="region")
    edit.undo()
    assert str(program.graph("")) == before


@pytest.mark.parametrize("names", [[], ["x"], ["output"], ["shared", "output"]])
def test_regions_are_made_of_operations(program: Program, names: list[str]) -> None:
    edit = Edit(program, Site(program, "", {}), "test_pass")
    with pytest.raises(MatchFailure, match="one or more operations"):
        edit.outline([node for node in edit.graph.nodes if node.name in names], name="region")


def test_names_that_are_taken_are_numbered(program: Program) -> None:
    outlined(program, "", "mul", name="shared")
    assert isinstance(program.module("shared_1"), Region)


def test_children_with_colliding_names_stay_apart() -> None:
    class Names(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.ModuleList([nn.Linear(4, 4)])
            self.a_0 = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a_0(self.a[0](x))

    x = torch.randn(2, 4)
    program = fxopt.capture(Names(), (x,))
    expected = program.model(x)
    edit = outlined(program, "", *(node.name for node in program.graph("").nodes if node.op == "call_module"))
    assert torch.equal(program.model(x), expected)
    edit.inline(next(node for node in edit.graph.nodes if node.target == "region"))
    edit.finish()
    assert [node.target for node in edit.graph.nodes if node.op == "call_module"] == ["a.0", "a_0"]
    assert torch.equal(program.model(x), expected)


@pytest.mark.parametrize("assign", [False, True])
def test_checkpoints_know_nothing_of_regions(program: Program, assign: bool) -> None:
    other = Net()
    outlined(program, "", "block", "add", "shared_1")
    outlined(program, "block", "mlp", "mul")
    given = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    assert program.model.load_state_dict(given, assign=assign) == ([], [])
    assert_same(run(program.model), run(other))
    assert program.module("region").shared is program.model.shared
    assert program.module("block.region").mlp[0].weight is program.model.block.mlp[0].weight
    with pytest.raises(RuntimeError, match=r"Missing key.*shared.bias"):
        program.model.load_state_dict({name: tensor for name, tensor in given.items() if name != "shared.bias"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*region.shared.bias"):
        program.model.load_state_dict({**given, "region.shared.bias": torch.zeros(4)})


def test_a_region_s_own_state_dict_is_empty(program: Program) -> None:
    outlined(program, "", "block", "add", "shared_1")
    region = program.module("region")
    assert region.state_dict() == {}
    assert dict(program.model.named_parameters()).keys() == dict(Net().named_parameters()).keys()


def test_borrowed_tensors_are_not_tied(program: Program) -> None:
    outlined(program, "", "block", "add", "shared_1")
    assert program.analyses[TensorOwners].names("shared.weight") == ("shared.weight",)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_whole_and_their_own(program: Program, duplicate: Callable[[nn.Module], nn.Module]) -> None:
    outlined(program, "", "block", "add", "shared_1")
    model = program.model
    twin = duplicate(model)
    assert_same(run(twin), run(model))
    assert twin.region.shared is twin.shared is not model.shared
    with torch.no_grad():
        twin.shared.weight.zero_()
    assert not torch.equal(run(twin)[0], run(model)[0])


def test_moving_training_compiling_and_exporting(program: Program) -> None:
    outlined(program, "", "block", "add", "shared_1")
    model = program.model
    assert not model.eval().get_submodule("region").training
    expected = model(*INPUTS)
    wide = copy.deepcopy(model).double()(*(tensor.double() for tensor in INPUTS))
    assert wide[0].dtype is torch.float64
    torch.testing.assert_close(wide[0].float(), expected[0])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_same([*compiled(*INPUTS)], [*expected])
    assert_same([*torch.export.export(model, INPUTS).module()(*INPUTS)], [*expected])


class Checked(nn.Module):
    """Decide by the rank of an intermediate result."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.sum(-1).sin()
        if y.sum(0).ndim == 1:
            y = y * 2
        return y.cos()


def test_checks_stay_in_place() -> None:
    x, flat = torch.randn(2, 3, 4), torch.randn(3, 4)
    model = Checked()
    program = fxopt.capture(model, (x,))
    names = [node.name for node in program.graph("").nodes if node.op not in ("placeholder", "output")]
    assert any(node.target is require for node in program.graph("").nodes)
    with pytest.raises(MatchFailure, match="control flow depends on 'eq'"):
        outlined(program, "", *names)
    outlined(program, "", *names[names.index("require") :])
    assert torch.equal(program.model(x), model(x))
    assert torch.equal(program.model(flat), model(flat))


class DrawsThenDecides(nn.Module):
    """Draw, then decide by the rank of an intermediate result."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.rand_like(x) + x
        if y.sum(0).ndim == 1:
            return y * 2
        return y


def test_what_a_region_draws_is_drawn_once_where_a_check_misses() -> None:
    model = DrawsThenDecides()
    program = fxopt.capture(model, (torch.ones(2, 3),))
    outlined(program, "", "rand_like", "add")
    for given in (torch.ones(3, 3), torch.ones(2, 3, 4)):
        torch.manual_seed(0)
        expected = model(given), torch.rand(())
        torch.manual_seed(0)
        found = program.model(given), torch.rand(())
        assert_same(list(found), list(expected))


class Guarded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 2 else x


class CallsGuarded(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x.sin()) + 1


@pytest.mark.parametrize(("child", "reason"), [(Guarded(), "holds only where"), (Checked(), "checks")])
def test_graphs_that_do_not_always_hold_are_not_inlined(child: nn.Module, reason: str) -> None:
    program = fxopt.capture(CallsGuarded(child), (torch.randn(3, 2, 4),))
    edit = Edit(program, Site(program, "", {}), "test_pass")
    call = next(node for node in edit.graph.nodes if node.target == "child")
    with pytest.raises(MatchFailure, match=reason):
        edit.inline(call)


def test_inlining_a_child_keeps_it_in_its_place(program: Program) -> None:
    expected, state = run(program.model), list(program.model.state_dict())
    edit = Edit(program, Site(program, "", {}), "test_pass")
    new = edit.inline(next(node for node in edit.graph.nodes if node.target == "block"))
    edit.finish()
    assert [node.target for node in new if node.op == "call_module"] == ["block.norm", "block.mlp"]
    assert_same(run(program.model), expected)
    assert list(program.model.state_dict()) == state
    edit.undo()
    assert_same(run(program.model), expected)


def test_a_leaf_has_nothing_to_inline(program: Program) -> None:
    edit = Edit(program, Site(program, "", {}), "test_pass")
    with pytest.raises(MatchFailure, match="'shared' has no single graph"):
        edit.inline(next(node for node in edit.graph.nodes if node.target == "shared"))


def test_a_hooked_child_is_not_inlined(program: Program) -> None:
    program.model.block.register_forward_hook(lambda module, args, output: -output)
    edit = Edit(program, Site(program, "", {}), "test_pass")
    with pytest.raises(MatchFailure, match="hooks"):
        edit.inline(next(node for node in edit.graph.nodes if node.target == "block"))


class Pair(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"sin": x.sin(), "cos": x.cos()}


class UsesPair(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.pair = Pair()
        self.whole = whole

    def forward(self, x: Tensor) -> object:
        pair = self.pair(x)
        return pair if self.whole else pair["sin"] - pair["cos"]


def test_structures_are_taken_apart_on_inlining() -> None:
    x = torch.randn(3)
    program = fxopt.capture(UsesPair(whole=False), (x,))
    edit = Edit(program, Site(program, "", {}), "test_pass")
    edit.inline(next(node for node in edit.graph.nodes if node.target == "pair"))
    edit.finish()
    assert not any(node.op == "call_module" for node in program.graph("").nodes)
    assert torch.equal(program.model(x), x.sin() - x.cos())


def test_whole_structures_are_inlined_too() -> None:
    x = torch.randn(3)
    program = fxopt.capture(UsesPair(whole=True), (x,))
    edit = Edit(program, Site(program, "", {}), "test_pass")
    edit.inline(next(node for node in edit.graph.nodes if node.target == "pair"))
    edit.finish()
    assert torch.equal(program.model(x)["sin"], x.sin())


class ReadsAndWrites(nn.Module):
    """Reads a buffer, writes it, and goes on with what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        read = self.seen.view(-1) * x + 1
        self.seen.add_(1)
        return read.sin()


def test_a_second_region_goes_on_with_what_the_first_has_read() -> None:
    program = fxopt.capture(ReadsAndWrites(), (INPUTS[0],))
    edit = Edit(program, Site(program, "", {}), "test_pass")
    for names in (("mul", "add"), ("sin",)):
        edit.outline([node for node in edit.graph.nodes if node.name in names], name="region")
    edit.finish()
    assert torch.equal(program.model(INPUTS[0]), ReadsAndWrites()(INPUTS[0]))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(x).sin())


@dataclass(frozen=True)
class OutlineAll(Pass):
    """Put what draws into regions, in all modules at once."""

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site]:
        parts = [Site(program, name, {f"sin_{name}": "sin", f"drop_{name}": "dropout"}) for name in ("0", "1")]
        yield Site.over(program, *parts)

    def rewrite(self, site: Site, edit: Edit) -> None:
        for part in site.parts:
            with edit.at(part):
                edit.outline([part[label] for label in part.nodes], name="region")


def test_regions_in_several_modules_draw_what_these_drew() -> None:
    model = nn.Sequential(Dropping(), Dropping()).train()
    fast = fxopt.optimize(model, OutlineAll(), example_inputs=(INPUTS[0],), measure=False)
    assert [(each.status, each.reason) for each in fxopt.plan(fast).decisions] == [("applied", "")]

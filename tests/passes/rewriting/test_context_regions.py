"""No pass carries an operation across the edge of a context."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.compat import all_modules
from fxopt.errors import MatchFailure
from fxopt.passes.rewriting import Edit
from fxopt.passes.sites import Site
from fxopt.runtime.graphs import ContextRegion

X = (torch.randn(3, 6, generator=torch.Generator().manual_seed(0)),)


class Twins(nn.Module):
    """The same expression outside of a context, under two, and twice under one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a = torch.relu(self.layer(x))
        with torch.no_grad():
            b = torch.relu(self.layer(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            c = torch.relu(self.layer(x)) * torch.relu(self.layer(x))
        return a + 1, b + 1, c + 1


class Heads(nn.Module):
    """Equal heads, some of them called under a context (too)."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(4))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        outside = list(self.heads) if self.again else list(self.heads)[:2]
        y = torch.cat([head(x) for head in outside], -1)
        with torch.no_grad():
            z = torch.cat([head(x) for head in list(self.heads)[2:]], -1)
        return torch.cat([y, z], -1)


class Members(nn.Module):
    """An ensemble whose members open a context."""

    class Member(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.layer(x)

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(self.Member() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([member(x) for member in self.members], -1)


class Constants(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            table = torch.ones(6, 6) @ torch.ones(6, 6)
        with torch.no_grad():
            offset = torch.arange(6) * 2
        return x @ table.float() + offset


def assert_equal(given: torch.nn.Module, expected: nn.Module) -> None:
    a, b = given(*X), expected(*X)
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other)
        assert one.requires_grad == other.requires_grad
        assert one.dtype == other.dtype


def refusals(model: nn.Module) -> list[str]:
    return [decision.reason for decision in fxopt.plan(model).decisions if decision.status == "refused"]


def test_equal_expressions_are_merged_within_a_context_only() -> None:
    model = Twins()
    fast = fxopt.optimize(model, passes=["eliminate_common_subexpressions"], example_inputs=X, measure=False)
    assert_equal(fast, model)
    graphs = fxopt.graphs(fast)
    assert len(graphs[""].find_nodes(op="call_module", target="layer")) == 1
    assert len(graphs["no_grad_0"].find_nodes(op="call_module")) == 1
    assert len(graphs["autocast_0"].find_nodes(op="call_module")) == 1


def test_what_a_pass_changed_under_a_context_runs_though_nothing_else_was_changed() -> None:
    class Alone(Twins):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            with torch.no_grad():
                y = torch.relu(self.layer(x)) * torch.relu(self.layer(x))
            return (y + 1,)

    model, calls = Alone(), []
    fast = fxopt.optimize(model, passes=["eliminate_common_subexpressions"], example_inputs=X, measure=False)
    fast.layer.register_forward_hook(lambda *_: calls.append("called"))
    assert_equal(fast, model)
    assert calls == ["called"]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_members_are_not_fused_across_a_context(again: bool, training: bool) -> None:
    model = Heads(again=again).train(training)
    fast = fxopt.optimize(model, passes="fuse_ensembles{lowering=bmm}", example_inputs=X, measure=False)
    assert_equal(fast, model)
    reasons = " ".join(refusals(fast))
    assert ("called under no_grad(), and module '(root)' uses members too" in reasons) == again
    assert ("region 'no_grad_0' uses members too" in reasons) == (again and training)
    assert len(fxopt.graphs(fast)["no_grad_0"].find_nodes(op="call_module")) == (2 if again else 0)
    fast.load_state_dict(model.state_dict())
    assert list(fxopt.state_dict(fast)) == list(model.state_dict())
    assert list(fxopt.restore(fast).state_dict()) == list(model.state_dict())
    assert not any(isinstance(module, ContextRegion) for module in all_modules(fxopt.restore(fast)))


def test_members_that_open_a_context_are_not_fused() -> None:
    model = Members()
    fast = fxopt.optimize(model, passes="fuse_ensembles{lowering=bmm}", example_inputs=X, measure=False)
    assert_equal(fast, model)
    assert any("it opens autocast(" in reason for reason in refusals(fast))


def test_members_with_a_call_of_their_own_are_not_fused() -> None:
    class Counted(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def __call__(self, x: Tensor) -> Tensor:
            Counted.calls += 1
            return super().__call__(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    model = Members()
    model.members = nn.ModuleList(Counted() for _ in range(4))
    fast = fxopt.optimize(model, passes="fuse_ensembles{lowering=bmm}", example_inputs=X, measure=False)
    assert any("it has a __call__ of its own" in reason for reason in refusals(fast))
    Counted.calls = 0
    assert_equal(fast, model)
    assert Counted.calls == 8


def test_constants_under_autocast_are_not_folded() -> None:
    model = Constants()
    fast = fxopt.optimize(model, passes=["fold_constants"], example_inputs=X, measure=False)
    assert_equal(fast, model)
    assert any("computed under autocast(" in reason for reason in refusals(fast))
    assert fxopt.graphs(fast)["autocast_0"].find_nodes(op="get_attr") == []


def test_inlining_stops_at_a_context_and_outlining_may_hold_one() -> None:
    program = fxopt.capture(Twins(), X)
    edit = Edit(program, Site(program, "", {}), "test_pass")
    call = next(node for node in edit.graph.nodes if node.target == "no_grad_0")
    with pytest.raises(MatchFailure, match=r"it opens no_grad\(\)"):
        edit.inline(call)
    edit.outline([call, next(iter(call.users))], name="region")
    edit.finish()
    assert_equal(program.model, Twins())


def test_functions_on_the_graph_keep_the_context() -> None:
    def double(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        for node in graph_module.graph.find_nodes(op="call_function", target=torch.relu):
            node.target = torch.sigmoid
        return graph_module

    class Sigmoid(Twins):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            a = torch.sigmoid(self.layer(x))
            with torch.no_grad():
                b = torch.sigmoid(self.layer(x))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                c = torch.sigmoid(self.layer(x)) * torch.sigmoid(self.layer(x))
            return a + 1, b + 1, c + 1

    fast = fxopt.optimize(Twins(), passes=[double], example_inputs=X, verify=False, measure=False)
    assert_equal(fast, Sigmoid())


def test_preset_on_contexts() -> None:
    for model in (Twins().eval(), Heads(again=False).eval(), Constants().eval()):
        assert_equal(fxopt.optimize(model, passes="inference", example_inputs=X, measure=False), model)


def test_contexts_are_exported(tmp_path) -> None:
    fast = fxopt.optimize(Twins().eval(), passes="inference", example_inputs=X, measure=False)
    fxopt.export(fast, tmp_path / "m.pt2", X)
    torch.testing.assert_close(fxopt.load(tmp_path / "m.pt2")(*X), fast(*X))


@pytest.mark.parametrize("passes", ["", "checkpoint{budget=0}", "autocast,checkpoint{budget=0}"])
def test_a_child_that_is_put_in_the_place_of_another_is_called_in_regions(passes: str) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = self.last(x)
            return torch.sin(torch.exp(self.norm(self.first(x)))) + y

    x = torch.randn(8, 6)
    model = Layers().train()
    fast = (
        fxopt.optimize(model, passes, example_inputs=(x,), measure=False)
        if passes
        else fxopt.capture(model, (x,)).model
    )
    names = list(model.state_dict())
    for name in ("first", "norm", "last"):
        new = type(model.get_submodule(name))(*((6,) if name == "norm" else (6, 6)))
        nn.init.constant_(new.weight, 0.25)
        fast.add_module(name, new) if name == "last" else setattr(fast, name, new)
    assert [name for name, _ in fast.named_parameters()] == [
        name for name in names if not ("running" in name or "num" in name)
    ]
    plain = Layers().train()
    plain.load_state_dict(fast.state_dict())
    torch.testing.assert_close(fast(x), plain(x), rtol=0.05, atol=0.05)

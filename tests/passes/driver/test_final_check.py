"""The model as handed over is compared whole with the original, and what makes it another is undone, by halving."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from support.small_models import Stack
from support.subtractions import Subtractions
from torch import Tensor, fx, nn

import fxopt
from fxopt.errors import BudgetError
from fxopt.passes.contract import Pass
from fxopt.passes.driver.whole_model import FinalCheck
from fxopt.passes.rewriting import Edit, module, operation
from fxopt.passes.sites import Goal, Refusal, Site
from fxopt.passes.verification import Original
from fxopt.tracing.examples import Inputs
from fxopt.tracing.program import Program

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def statuses(model: nn.Module) -> dict[str, str]:
    return {decision.key.partition(":")[0]: decision.status for decision in fxopt.plan(model).decisions}


def reasons(model: nn.Module) -> str:
    return " ".join(decision.reason for decision in fxopt.plan(model).decisions)


def assert_same(fast: nn.Module, model: nn.Module, x: Tensor = X) -> None:
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class Chains(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.chains = nn.ModuleList(chain() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.chains:
            x = each(x)
        return x


@dataclasses.dataclass(frozen=True)
class Renew(Pass):
    """Put copies of its layers into each `Sequential`; where told so, in another order than the graph's."""

    wrong: tuple[str, ...] = ("",)

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for owner in program.captures:
            if isinstance(program.module(owner), nn.Sequential):
                yield Site(program, owner, {})

    def rewrite(self, site: Site, edit: Edit) -> None:
        names = ["0"] if site.owner in self.wrong else ["0", "1", "2"]
        for name in names:
            new = copy.deepcopy(edit.owner.get_submodule(name))
            edit.remove_module(name)
            edit.add_module(new, name=name)


def test_a_child_that_is_verified_in_one_order_and_runs_in_another_is_undone() -> None:
    model = chain()
    fast = fxopt.optimize(model, [Renew()], example_inputs=(X,))
    assert statuses(fast) == {"(root)": "undone"}
    assert "the model as handed over is wrong with it: output differs" in reasons(fast)
    assert list(fast._modules) == ["0", "1", "2"]
    assert_same(fast, model)


@pytest.mark.parametrize("wrong", [("chains.0",), ("chains.4",), ("chains.1", "chains.3")])
def test_only_the_guilty_sites_are_undone(wrong: tuple[str, ...]) -> None:
    model = Chains(5)
    fast = fxopt.optimize(model, [Renew(wrong)], example_inputs=(X,))
    assert statuses(fast) == {f"chains.{i}": "undone" if f"chains.{i}" in wrong else "applied" for i in range(5)}
    assert_same(fast, model)


class Quick(Renew):
    """The same for speed."""

    goal: ClassVar[Goal] = Goal.SPEED


def test_where_no_time_is_left_only_what_is_for_speed_goes_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FinalCheck, "_has_time", False)
    passes = [Renew(()), Quick(("chains.1",))]
    fast = fxopt.optimize(Chains(3), passes, example_inputs=(X,), measure=False)
    assert [d.status for d in fxopt.plan(fast).decisions] == ["applied"] * 3 + ["undone"] * 3
    with pytest.raises(BudgetError, match=r"wrong with what renew did: output differs.* give a larger time_budget"):
        fxopt.optimize(Chains(3), Renew(("chains.1",)), example_inputs=(X,))


def spoil(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with torch.no_grad():
        weight.mul_(1.5)
    return F.linear(x, weight, bias)


@dataclasses.dataclass(frozen=True)
class Spoil(Pass):
    """Scale the weights of linear layers at each call; where told so, compute them as they were."""

    wrong: tuple[str, ...] = ()

    goal: ClassVar[Goal] = Goal.SIZE
    profiles_itself: ClassVar[bool] = True

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for match in program.matches(module(nn.Linear, name="linear")):
            yield match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("linear")
        tensors = [edit.get_attr(f"{node.target}.{name}", before=node) for name in ("weight", "bias")]
        compute = spoil if node.target in self.wrong else F.linear
        edit.replace(node, edit.call(compute, node.args[0], *tensors))


@pytest.mark.parametrize("trains", [True, False])
def test_what_writes_to_weights_is_undone_and_they_are_put_back(trains: bool) -> None:
    model = chain().eval().requires_grad_(trains)
    fast = fxopt.optimize(model, Spoil(("0",)), example_inputs=(X,), measure=False)
    assert {decision.status for decision in fxopt.plan(fast).decisions} == {"undone"}
    for name, tensor in model.state_dict().items():
        assert torch.equal(fast.state_dict()[name], tensor)
    assert_same(fast, model)


def test_models_with_sparse_buffers_are_compared() -> None:
    class Spread(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("edges", torch.eye(3).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.edges, super().forward(x))

    model = nn.Sequential(Spread(), *chain()).eval().requires_grad_(False)
    fast = fxopt.optimize(model, Spoil(), example_inputs=(X,), measure=False)
    assert "applied" in statuses(fast).values()
    assert_same(fast, model)


def test_a_replayed_plan_is_compared_too() -> None:
    model = Chains(2)
    plan = fxopt.plan(fxopt.optimize(model, [Renew(("chains.1",))], example_inputs=(X,), verify=False))
    fast = fxopt.optimize(model, [Renew(("chains.1",))], example_inputs=(X,), plan=plan)
    assert statuses(fast) == {"chains.0": "applied", "chains.1": "undone"}
    assert_same(fast, model)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 1.0 - x


class HookLast(Subtractions):
    """Write the subtraction as a function; in the last of equal blocks change what its module gives, too."""

    def rewrite(self, site: Site, edit: Edit) -> None:
        super().rewrite(site, edit)
        if site.owner == "blocks.2":
            first = edit.program.module("blocks.0.inner")
            handle = first.register_forward_hook(lambda _, args, output: output * 2)
            edit.on_undo(handle.remove)


def test_what_an_equal_block_does_to_another_one_is_undone() -> None:
    model = Stack(Block() for _ in range(3))
    fast = fxopt.optimize(model, [HookLast()], example_inputs=(X,))
    assert statuses(fast) == {"blocks.0": "applied", "blocks.1": "applied", "blocks.2": "undone"}
    assert_same(fast, model)


class Caller(nn.Module):
    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = nn.Linear(4, 4)
        self.first, self.second = Caller(inner, 2.0), Caller(inner, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class FactorIntoChild(Pass):
    """Let the child of one caller multiply: right there, wrong for whoever else calls the child."""

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for match in program.matches(operation("mul", name="mul")):
            if match.site().owner == "first":
                yield match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("mul")
        handle = edit.owner.inner.register_forward_hook(lambda _, args, output: output * 2.0)
        edit.on_undo(handle.remove)
        edit.replace(node, node.args[0])


def test_what_is_right_for_one_caller_and_wrong_for_another_is_undone() -> None:
    model = Shared()
    fast = fxopt.optimize(model, [FactorIntoChild()], example_inputs=(X,))
    assert statuses(fast)["first"] != "applied"
    assert_same(fast, model)


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(x, 1) * 1.5


def burn_in(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Write the number of rows of the example into the graph."""
    for node in graph_module.graph.find_nodes(op="call_function", target=torch.flatten):
        with graph_module.graph.inserting_before(node):
            new = graph_module.graph.call_method("view", (node.args[0], len(X), -1))
        node.replace_all_uses_with(new)
        graph_module.graph.erase_node(node)
    return graph_module


def test_a_number_of_rows_that_is_written_into_a_graph_is_found() -> None:
    model = Flat()
    fast = fxopt.optimize(model, [burn_in], example_inputs=(X,))
    assert statuses(fast) == {"(root)": "undone"}
    assert_same(fast, model, torch.randn(7, 2, 2))


class Heads(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.ReLU(), nn.Linear(8, 2)) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads])


@pytest.mark.parametrize("training", [True, False])
def test_a_fused_ensemble_with_dropout_is_the_same_model(training: bool) -> None:
    model = Heads(0.3).train(training)
    fast = fxopt.optimize(model, ["fuse_ensembles{lowering=bmm}"], example_inputs=(X,), measure=False)
    assert set(statuses(fast).values()) == {"applied"}


class Restless(nn.Module):
    """Draws from a generator of its own: it is never the same twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = chain()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + torch.rand(1, generator=GENERATOR)


GENERATOR = torch.Generator().manual_seed(0)


def test_a_model_that_differs_from_itself_tells_nothing() -> None:
    fast = fxopt.optimize(Restless(), [Renew(())], example_inputs=(X,))
    assert "undone" not in statuses(fast).values()


# -- what it costs -------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    calls: list[nn.Module] = []
    forward = Heads.forward

    def counting(self: Heads, x: Tensor) -> Tensor:
        calls.append(self)
        return forward(self, x)

    monkeypatch.setattr(Heads, "forward", counting)
    return lambda: len(calls)


def test_a_model_that_is_the_same_runs_once_a_call(counted: Callable[[], int]) -> None:
    model = Heads().eval()
    original = Original(model, [Inputs(X)], gradients=False)
    assert counted() == 2  # the example, and with another row
    assert original.verdict(copy.deepcopy(model)).ok
    assert counted() == 6  # each of them again, and the two with many rows


def test_nothing_runs_where_nothing_was_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the whole model was compared")

    monkeypatch.setattr(Original, "verdict", never)
    fxopt.optimize(Flat(), ["fuse_ensembles"], example_inputs=(X,))


# -- the comparison itself -----------------------------------------------------------------------------------------


def shifted(model: nn.Module, change: Callable[[nn.Module], None]) -> nn.Module:
    other = copy.deepcopy(model)
    change(other)
    return other


def test_the_comparison_sees_outputs_gradients_buffers_and_form() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    original = Original(model, [Inputs(X)], training=True, gradients=True)
    assert original.verdict(copy.deepcopy(model)).ok
    halved = shifted(model, lambda m: m[1].register_forward_hook(lambda _, a, y: y * 0.5))
    assert "output" in original.verdict(halved).reason
    slow = shifted(model, lambda m: setattr(m[1], "momentum", 0.2))
    assert "buffer 1.running_mean" in original.verdict(slow).reason
    deaf = shifted(model, lambda m: m[0].register_forward_hook(lambda _, a, y: y.detach() + 0 * m[0].bias))
    assert "gradient" in original.verdict(deaf).reason
    narrow = shifted(model, lambda m: m.register_forward_hook(lambda _, a, y: y.bfloat16()))
    assert "dtype" in original.verdict(narrow).reason
    other = shifted(model, lambda m: m[0].weight.data.mul_(2))
    assert "does not have the values" in original.verdict(other).reason


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.bfloat16, 1.05), (torch.float16, 1.01), (torch.float64, 1 + 1e-9)]
)
def test_the_comparison_knows_what_each_type_rounds(dtype: torch.dtype, factor: float) -> None:
    model = chain().to(dtype)
    original = Original(model, [Inputs(X.to(dtype))])
    assert original.verdict(copy.deepcopy(model)).ok
    assert "output" in original.verdict(shifted(model, lambda m: _scaled(m, factor))).reason


def _scaled(model: nn.Module, factor: float) -> Any:
    return model[1].register_forward_hook(lambda _, args, output: output * factor)

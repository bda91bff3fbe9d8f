"""Ensembles in modules with several graphs: other ones in training than in evaluation, or for other kinds of call."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime.graphs import capture_of
from fxopt.runtime.record import record_of
from fxopt.testing import assert_equivalent
from fxopt.transforms.fuse_ensembles import FuseEnsembles, Lowering

N = 3


class Home(nn.Module):
    """The module itself does something else in training."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 5) for _ in range(N))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self.training:
            y = torch.stack([head(x + 1) for head in self.heads])
            return y, y.square().mean()
        return torch.cat([torch.relu(head(x)) for head in self.heads], -1)


class Member(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x))
        if self.training:
            y = y * 2 + 1
        return self.outer(y)


class Members(nn.Module):
    """Each member does something else in training."""

    def __init__(self, member: Callable[[], nn.Module] = Member) -> None:
        super().__init__()
        self.heads = nn.ModuleList(member() for _ in range(N))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads]).mean(0)


class Both(Members):
    """The module and its members do."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + 1 if self.training else y


class Deep(nn.Module):
    """Members whose parts do, two levels below."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), Member()) for _ in range(N))
        self.out = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.stack([head(x) for head in self.heads]).sum(0))


def fused(model: nn.Module, inputs: object, lowering: str = "bmm", **options: object) -> nn.Module:
    given = (inputs,) if isinstance(inputs, Tensor) else inputs
    fast = fxopt.optimize(model, FuseEnsembles(Lowering(lowering)), example_inputs=given, **options)  # type: ignore[arg-type]
    assert any(d.status == "applied" for d in fxopt.plan(fast).decisions), fxopt.plan(fast).decisions
    return fast


def linears(model: nn.Module, owner: str = "") -> list[int]:
    """Return how many linear operations each graph of a module has."""
    capture = capture_of(model.get_submodule(owner))
    assert capture is not None
    return [
        sum("linear" in str(n.target) or isinstance(_callee(model, owner, n), nn.Linear) for n in v.graph.nodes)
        for v in capture.specializations
    ]


def _callee(model: nn.Module, owner: str, node: torch.fx.Node) -> nn.Module | None:
    return model.get_submodule(owner).get_submodule(str(node.target)) if node.op == "call_module" else None


def assert_runs_from_graphs(model: nn.Module) -> None:
    for module in model.modules():
        capture = capture_of(module)
        assert capture is None or not capture.misses


@pytest.mark.parametrize("make", [Home, Members, Both, Deep])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("lowering", ["bmm", "wide", "vmap"])
def test_both_modes_are_fused(make: Callable[[], nn.Module], training: bool, lowering: str) -> None:
    torch.manual_seed(0)
    model = make().train(training)
    x = torch.randn(5, 4)
    fast = fused(model, x, lowering)
    assert not isinstance(fast, Home) or linears(fast) == ([0, 0] if lowering == "vmap" else [1, 1])
    for mode in (training, not training):
        model.train(mode), fast.train(mode)
        assert_equivalent(model, fast, (x,), map_state=record_of(fast).state_map.forward)
    assert_runs_from_graphs(fast)


@pytest.mark.parametrize("make", [Home, Members, Both])
def test_the_graphs_in_both_modes(make: Callable[[], nn.Module]) -> None:
    fast = fused(make(), torch.randn(5, 4))
    capture = capture_of(fast)
    assert capture is not None and len(capture.specializations) == 2
    for specialization in capture.specializations:
        assert not any(str(node.target).startswith("heads.") for node in specialization.graph.nodes)
    one, other = ({str(g) for g in v.guards if "training" in str(g)} for v in capture.specializations)
    assert one and one == {g.removeprefix("not ") for g in other} != other


def test_the_report_shows_both_graphs() -> None:
    fast = fused(Members(), torch.randn(5, 4))
    assert set(fxopt.graphs(fast)) >= {"", "#1"}
    diff = str(fxopt.report(fast).diff())
    assert diff.count("+    %batched_linear") + diff.count("+    %shared_batched_linear") >= 2


@pytest.mark.parametrize("make", [Home, Members, Both, Deep])
def test_checkpoints_copies_and_restoring(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, other = make(), make().eval()
    x = torch.randn(5, 4)
    fast = fused(model, x)
    fast.load_state_dict(other.state_dict())
    torch.testing.assert_close(fxopt.state_dict(fast), other.state_dict())
    for twin in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), fxopt.restore(fast)):
        for mode in (False, True):
            torch.testing.assert_close(twin.train(mode)(x), other.train(mode)(x))


@pytest.mark.parametrize("make", [Home, Members, Both, Deep])
def test_the_evaluation_mode_is_exported(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    model, x = make(), torch.randn(5, 4)
    fxopt.export(fused(model, x), tmp_path / "fused.pt2", (x,))
    torch.testing.assert_close(fxopt.load(tmp_path / "fused.pt2")(x), model.eval()(x))


@pytest.mark.parametrize("make", [Home, Members, Both])
def test_twice_is_once_and_a_plan_repeats_it(make: Callable[[], nn.Module]) -> None:
    model, x = make(), torch.randn(5, 4)
    once = fused(model, x)
    twice = fxopt.optimize(once, FuseEnsembles(Lowering.BMM), example_inputs=(x,))
    again = fxopt.optimize(model, FuseEnsembles(Lowering.BMM), example_inputs=(x,), plan=fxopt.plan(once))
    for other in (twice, again):
        assert {name: str(graph) for name, graph in fxopt.graphs(other).items()} == {
            name: str(graph) for name, graph in fxopt.graphs(once).items()
        }


def test_members_in_unlike_modes_run_one_by_one() -> None:
    model = Members()
    fast = fused(model, x := torch.randn(5, 4))
    for module in (model, fast):
        module.heads[1].eval()
    torch.testing.assert_close(fast(x), model(x))


def test_a_model_in_unlike_modes() -> None:
    model = Both()
    model.heads.eval()
    x = torch.randn(5, 4)
    fast = fused(model, x)
    torch.testing.assert_close(fast(x), model(x))
    assert_runs_from_graphs(fast)
    torch.testing.assert_close(fast.eval()(x), model.eval()(x))


class OnlyInTraining(nn.Module):
    """Auxiliary heads that evaluation does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.auxiliary = nn.ModuleList(nn.Linear(4, 2) for _ in range(N))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = self.body(x)
        return (y, torch.stack([head(y) for head in self.auxiliary])) if self.training else y


def test_members_of_one_mode_only() -> None:
    model, x = OnlyInTraining(), torch.randn(5, 4)
    fast = fused(model, x)
    for mode in (True, False):
        torch.testing.assert_close(fast.train(mode)(x), model.train(mode)(x))
    assert_runs_from_graphs(fast)
    same = fxopt.optimize(model.eval(), FuseEnsembles(Lowering.BMM), example_inputs=(x,))
    assert not fxopt.plan(same).decisions


class Unlike(nn.Module):
    """The members' order is another one in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(N))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return torch.stack([head(x) for head in self.heads]).sum(0)
        return self.heads[0](self.heads[1](self.heads[2](x)))


@pytest.mark.parametrize("training", [True, False])
def test_members_that_one_mode_computes_otherwise(training: bool) -> None:
    model, x = Unlike().train(training), torch.randn(5, 4)
    fast = fxopt.optimize(model, FuseEnsembles(Lowering.BMM), example_inputs=(x,))
    reasons = [d.reason for d in fxopt.plan(fast).decisions]
    assert reasons == (["graph 1 of this module in evaluation uses its members in another way"] * training)
    for mode in (True, False):
        torch.testing.assert_close(fast.train(mode)(x), model.train(mode)(x))


class Chained(nn.Module):
    """Members that compute with their parameters in another way in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.training else torch.linalg.qr(self.linear.weight)[0] @ x.T


def test_members_that_compute_otherwise_in_one_mode() -> None:
    fast = fxopt.optimize(Members(Chained), FuseEnsembles(Lowering.BMM), example_inputs=(torch.randn(4, 4),))
    (decision,) = fxopt.plan(fast).decisions
    assert decision.status == "refused" and "in evaluation uses its members in another way" in decision.reason


class Reaching(nn.Module):
    """In training each head is a result of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(N))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        results = [head(x) for head in self.heads]
        return tuple(results) if self.training else torch.stack(results)


def test_outputs_that_only_training_keeps_apart() -> None:
    model, x = Reaching().eval(), torch.randn(5, 4)
    fast = fused(model, x)
    torch.testing.assert_close(fast(x), model(x))
    with pytest.raises(fxopt.ModeError, match="fuse_ensembles"):
        fast.train()
    refused = fxopt.optimize(model.train(), FuseEnsembles(Lowering.BMM), example_inputs=(x,))
    assert ["gradients to some of them only" in d.reason for d in fxopt.plan(refused).decisions] == [True]


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Reaching(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[object, Tensor]:
        return self.inner(x), self.last(x)


def test_modules_that_only_evaluation_fuses_cannot_be_trained_by_themselves() -> None:
    x = torch.randn(5, 4)
    fast = fused(Around().eval(), x)
    with pytest.raises(fxopt.ModeError, match="Reaching was rewritten for evaluation by fuse_ensembles"):
        fast.inner.train()
    with pytest.raises(fxopt.ModeError, match="Reaching was rewritten for evaluation by fuse_ensembles"):
        fast.inner.training = True
    with pytest.raises(fxopt.ModeError, match="Around was rewritten for evaluation by fuse_ensembles"):
        fast.training = True
    fast.last.training = True
    assert isinstance(fxopt.restore(fast).inner.train()(x), tuple)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 5) for _ in range(N))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            return torch.stack([head(x * mask) for head in self.heads])
        return torch.stack([head(x) for head in self.heads]).sum(0)


def test_kinds_of_call() -> None:
    model, x, mask = Masked(), torch.randn(5, 4), torch.randint(0, 2, (5, 1)).float()
    fast = fused(model, [(x,), (x, mask)])
    assert linears(fast) == [1, 1]
    for inputs in ((x,), (x, mask)):
        assert_equivalent(model, fast, inputs, map_state=record_of(fast).state_map.forward)
    assert_runs_from_graphs(fast)


class Outer(nn.Module):
    """Members with a graph for each kind of call."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.ModuleList(Masked() for _ in range(N)), Masked()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        plain = torch.stack([member(x) for member in self.one])
        return plain.mean(0) + torch.stack([member(x, mask) for member in self.one]).mean((0, 1)) + self.other(x, mask)


def test_members_called_in_several_ways() -> None:
    model, inputs = Outer(), (torch.randn(5, 4), torch.rand(5, 1))
    fast = fxopt.optimize(model, FuseEnsembles(Lowering.BMM), example_inputs=inputs)
    torch.testing.assert_close(fast(*inputs), model(*inputs))
    assert [d.label for d in fxopt.plan(fast).decisions if d.status == "applied"][-1] == "other.heads"


@pytest.mark.parametrize("make", [Home, Members])
def test_training_equals_training_the_members(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(5, 4, dtype=torch.float64)
    fast, twin = fused(model, x), copy.deepcopy(model)
    ours, theirs = (torch.optim.Adam(m.parameters(), 1e-2) for m in (fast, twin))
    for _ in range(20):
        for module, optimizer in ((fast, ours), (twin, theirs)):
            optimizer.zero_grad()
            sum(y.square().mean() for y in module.train()(x)).backward()  # type: ignore[union-attr]
            optimizer.step()
        torch.testing.assert_close(fast.eval()(x), twin.eval()(x), rtol=1e-9, atol=1e-9)


def test_projections_of_bert_attention() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    ids = torch.randint(0, 30, (2, 6))
    fast = fused(model, ids, "wide")
    owners = [f"encoder.layer.{i}.attention.self" for i in range(2)]
    assert [linears(fast, owner) for owner in owners] == [[1, 1]] * 2
    applied = [d for d in fxopt.plan(fast).decisions if d.status == "applied"]
    assert [d.detail for d in applied] == ["3 members, 2 parameters each"] * 2
    torch.testing.assert_close(fast(ids)[0], model(ids)[0])
    assert list(fxopt.state_dict(fast)) == list(model.state_dict())
    torch.manual_seed(1)
    expected = model.train()(ids)[0]
    torch.manual_seed(1)
    torch.testing.assert_close(fast.train()(ids)[0], expected)
    assert_runs_from_graphs(fast)
    torch.testing.assert_close(fxopt.restore(fast).eval()(ids)[0], model.eval()(ids)[0])

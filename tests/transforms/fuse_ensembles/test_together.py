"""Several ensembles in one graph: written together, and worth it together."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.errors import FusedMemberError
from fxopt.passes.driver import Group, grouped
from fxopt.passes.rewriting import Edit
from fxopt.testing import assert_equivalent
from fxopt.transforms.fuse_ensembles import FuseEnsembles


class Unequal(nn.Module):
    """Members of two shapes that share a trunk's shape: the trunks are one ensemble, the ends two."""

    def __init__(self) -> None:
        super().__init__()
        ends = (2, 3, 2, 3, 2)
        self.members = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, end)) for end in ends)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([member(x) for member in self.members], -1)


class Chain(nn.Module):
    """Ensembles one after another, with weights, biases and a dropout that only training has."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.groups = nn.ModuleList(nn.ModuleList(nn.Linear(4, 2) for _ in range(2)) for _ in range(length))
        self.gates = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, group in enumerate(self.groups):
            if self.training and number == 1:
                x = x * 0.5
            x = x + torch.cat([member(x) for member in group], -1)
        return sum(gate(x) for gate in self.gates)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
MODELS = {"unequal": Unequal, "chain": lambda: Chain(4)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lowering", ["wide", "bmm", "grouped_conv", "vmap", "mlp"])
@pytest.mark.parametrize("training", [True, False])
def test_ensembles_of_one_graph_are_fused_as_one(name: str, lowering: str, training: bool) -> None:
    model = MODELS[name]().train(training)
    fast = fxopt.optimize(model, f"fuse_ensembles{{lowering={lowering}}}", example_inputs=(X,), measure=False)
    decisions = fxopt.plan(fast).decisions
    assert len(decisions) > 1
    assert {decision.status for decision in decisions} == {"applied"}
    assert {decision.figures["group_size"] for decision in decisions} == {len(decisions)}
    assert_equivalent(model, fast, [(X,)])
    assert fxopt.state_dict(fast).keys() == model.state_dict().keys()
    restored = fxopt.restore(fast)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in restored.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("both_modes", [True, False])
def test_written_at_once_they_are_what_they_are_one_after_another(name: str, both_modes: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    graphs: list[dict[str, str]] = []
    results: list[Tensor] = []
    names: list[list[str]] = []
    for at_once in (True, False):
        program = fxopt.capture(model, (X,))
        found = grouped(FuseEnsembles(), list(FuseEnsembles().find(program)))
        assert isinstance(found[0], Group)
        sites = found[0].lowered("bmm").sites
        edit = Edit(program, sites[0], "fuse_ensembles")
        for some in [sites] if at_once else [(site,) for site in sites]:
            FuseEnsembles().rewrite_group(some, edit)
        edit.finish()
        program.model.train(both_modes)
        results.append(program.model(X))
        names.append(list(program.model.state_dict()))
        graphs.append({name: "\n".join(sorted(str(graph).splitlines())) for name, graph in program.graphs.items()})
        program.model.train()
        edit.undo()
        assert torch.equal(program.model(X), model(X))
    assert torch.equal(*results)
    assert names[0] == names[1]
    assert graphs[0].keys() == graphs[1].keys()


def test_a_plan_repeats_all_of_them() -> None:
    model = Chain(3)
    fast = fxopt.optimize(model, "fuse_ensembles", example_inputs=(X,), measure=False)
    again = fxopt.optimize(model, "fuse_ensembles", example_inputs=(X,), plan=fxopt.plan(fast))
    assert list(again.state_dict()) == list(fast.state_dict())
    assert {k: str(v) for k, v in fxopt.graphs(again).items()} == {k: str(v) for k, v in fxopt.graphs(fast).items()}
    statuses = [dataclasses.replace(decision, figures={}) for decision in fxopt.plan(again).decisions]
    assert statuses == [dataclasses.replace(decision, figures={}) for decision in fxopt.plan(fast).decisions]


def test_measured_they_stay_where_they_pay_together() -> None:
    model = Unequal().eval()
    fast = fxopt.optimize(model, "fuse_ensembles", example_inputs=(X,))
    assert_equivalent(model, fast, [(X,)])
    for decision in fxopt.plan(fast).decisions:
        slow = decision.reason.startswith(("no faster", "not clearly faster", "the whole model"))
        assert decision.status == "applied" or slow


class NormThenHeads(nn.Sequential):
    """A container of the user's with a forward of its own: a folded batch norm, then an ensemble."""

    def forward(self, x: Tensor) -> Tensor:
        convolution, norm, *heads = self
        y = norm(convolution(x))
        return torch.stack([head(y) for head in heads])


def test_a_container_in_which_layers_were_folded_takes_an_ensemble():
    heads = [nn.Linear(4, 2) for _ in range(3)]
    model, x = NormThenHeads(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), *heads).eval(), torch.randn(2, 3, 4)
    fast = fxopt.optimize(model, "fold_batchnorm,fuse_ensembles", example_inputs=x, measure=False)
    applied = [d.pass_name for d in fxopt.plan(fast).decisions if d.status == "applied"]
    assert applied == ["fold_batchnorm", "fuse_ensembles"]
    torch.testing.assert_close(fast(x), model(x))
    with pytest.raises(FusedMemberError, match="cannot be added"):
        fast.another = nn.Linear(4, 2)
    narrow = fxopt.optimize(model, "fold_batchnorm,autocast", example_inputs=x, measure=False)
    assert "autocast" in [d.pass_name for d in fxopt.plan(narrow).decisions if d.status == "applied"]


def test_weights_that_are_folded_alike_are_no_ensemble():
    blocks = [nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3), nn.ReLU()) for _ in range(3)]
    model, x = nn.Sequential(*blocks).eval(), torch.randn(2, 3, 4)
    fast = fxopt.optimize(model, "inference", example_inputs=x, measure=False)
    assert not [d for d in fxopt.plan(fast).decisions if d.pass_name == "fuse_ensembles"]
    torch.testing.assert_close(fast(x), model(x))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        trunks = (nn.Sequential(nn.Linear(4, 8), nn.Tanh()) for _ in range(8))
        self.heads = nn.ModuleList(nn.Sequential(trunk, nn.Linear(8, 2)) for trunk in trunks)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


def test_members_that_no_graph_calls_any_more_are_no_places_of_later_passes() -> None:
    fast = fxopt.optimize(Heads().eval(), "inference", example_inputs=X, measure=False)
    assert [decision.pass_name for decision in fxopt.plan(fast).decisions] == ["fuse_ensembles"]
    assert "parameter of its own" not in str(fxopt.report(fast))

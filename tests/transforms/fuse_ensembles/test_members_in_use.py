"""What users do with fused ensembles: autocast, pickles, gradients in evaluation; and members that are set apart."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.testing import assert_equivalent

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LOWERINGS = ("wide", "bmm", "grouped_conv", "vmap", "mlp")


class Normed(nn.Module):
    """A member with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.out = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.linear(x)).exp()).softmax(-1)


class Stacked(nn.Module):
    """Members on one input, their results stacked."""

    def __init__(self, member: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(member() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members])


def fused(model: nn.Module, lowering: str = "bmm", x: Tensor = X, **options: bool) -> nn.Module:
    passes = f"fuse_ensembles{{lowering={lowering}}}"
    fast = fxopt.optimize(model, passes, example_inputs=(x,), measure=False, **options)
    assert [decision.status for decision in fxopt.plan(fast).decisions] == ["applied"]
    return fast


def reasons(model: nn.Module, x: Tensor = X) -> str:
    fast = fxopt.optimize(model, "fuse_ensembles{lowering=vmap}", example_inputs=(x,), measure=False)
    return "; ".join(decision.reason for decision in fxopt.plan(fast).decisions)


# -- autocast ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_autocast_opened_later_casts_as_in_the_loop(lowering: str, training: bool) -> None:
    model = Stacked(Normed).train(training)
    fast = fused(model, lowering)
    model = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        given, expected = fast(X), model(X)
    assert given.dtype == expected.dtype
    torch.testing.assert_close(given, expected, rtol=0.02, atol=0.02)
    if training:
        norm = fxopt.state_dict(fast)["members.2.norm.running_mean"]
        torch.testing.assert_close(norm, model.members[2].norm.running_mean, rtol=0.02, atol=0.02)


def test_autocast_of_an_operator_that_has_no_batching_rule() -> None:
    class Member(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.cosine_similarity(self.linear(x), x, dim=-1)

    model = Stacked(Member).eval()
    fast = fused(model)
    with torch.autocast("cpu", torch.bfloat16):
        given, expected = fast(X), model(X)
    assert given.dtype == expected.dtype
    torch.testing.assert_close(given, expected, rtol=0.02, atol=0.02)


# -- pickles, whole shapes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_batch_norms_under_vmap_are_pickled(training: bool) -> None:
    fast = fused(Stacked(Normed).train(training), "vmap")
    for again in (pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast)):
        torch.testing.assert_close(again(X), copy.deepcopy(fast)(X))
        assert again.training is training


class ViewedAs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        return self.linear(x).view(like.size()) + 1


class Viewed(nn.Module):
    """Members that take the whole shape of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(ViewedAs() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        like = x.transpose(0, 1).contiguous()
        return torch.stack([member(x, like) for member in self.members])


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_view_of_a_whole_shape(lowering: str) -> None:
    model = Viewed()
    assert_equivalent(model, fused(model, lowering, verify=False), (X,))
    fast = fxopt.optimize(model, f"fuse_ensembles{{lowering={lowering}}}")
    torch.testing.assert_close(fast(X[:3]), model(X[:3]))


# -- members that are set apart ------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("training", [False, True])
def test_members_in_different_modes_stay_apart(which: int, training: bool) -> None:
    model = Stacked(Normed).train(training)
    model.members[which].train(not training)
    assert "members are in different modes" in reasons(model)
    fast = fxopt.optimize(model, "fuse_ensembles", example_inputs=(X,))
    torch.testing.assert_close(fast(X), copy.deepcopy(model)(X))


class Chained(nn.Module):
    """Members that read one list of parameters, each from another place on."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        w = list(self.weights)
        return torch.stack([F.linear(F.linear(x, w[i]), w[(i + 1) % 3]) for i in range(3)])


def test_a_parameter_in_two_positions_is_left_alone() -> None:
    model = Chained()
    assert "is read in two places" in reasons(model)
    assert_equivalent(model, fxopt.optimize(model, "fuse_ensembles", example_inputs=(X,), measure=False), (X,))


@pytest.mark.parametrize("examples", [(X,), None])
def test_frozen_members_are_not_trained_in_evaluation(examples: tuple[Tensor] | None) -> None:
    model = Stacked(lambda: nn.Linear(4, 3)).eval()
    model.members[1].requires_grad_(False)
    fast = fxopt.optimize(model, "fuse_ensembles", example_inputs=examples)
    for trained in (model, fast):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1, weight_decay=0.1)
        trained(X).square().sum().backward()
        optimizer.step()
    state = fxopt.state_dict(fast)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value)


# -- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowering", ["grouped_conv", "vmap"])
@pytest.mark.parametrize("padding", [0, -1])
def test_rows_of_padding_get_no_gradient(padding: int, lowering: str) -> None:
    model = Stacked(lambda: nn.Sequential(nn.Embedding(6, 4, padding_idx=padding), nn.Linear(4, 3)))
    indices = torch.tensor([[0, 1, 2], [0, 5, 5]])
    fast = fused(model, lowering, indices, verify=False)
    fast(indices).square().sum().backward()
    model(indices).square().sum().backward()
    for member, same in zip(fast.members, model.members, strict=True):
        torch.testing.assert_close(member[0].weight.grad, same[0].weight.grad)


class Best(nn.Module):
    """A member whose result is a place, and one that gives scores as well."""

    def __init__(self, *, scores: bool) -> None:
        super().__init__()
        self.linear, self.scores = nn.Linear(4, 5), scores

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * y.argmax(-1, keepdim=True) if self.scores else y.argmax(-1)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("scores", [False, True])
def test_members_whose_result_becomes_whole_numbers(scores: bool, lowering: str) -> None:
    model = Stacked(lambda: Best(scores=scores))
    fast = fused(model, lowering, verify=False)
    assert fast(X).requires_grad is model(X).requires_grad
    assert_equivalent(model, fast, (X,))

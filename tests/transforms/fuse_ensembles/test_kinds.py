"""fuse_ensembles on members of every kind, unequal members, and heads that nobody called an ensemble."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.mutation.members import Attention, First, Pooled
from torch import Tensor, nn

import fxopt
from fxopt.runtime.record import record_of
from fxopt.testing import assert_equivalent
from fxopt.transforms.fuse_ensembles import FuseEnsembles, Lowering

N = 3
Member = Callable[[], nn.Module]


class Shared(nn.Module):
    def __init__(self, member: Member) -> None:
        super().__init__()
        self.heads = nn.ModuleList(member() for _ in range(N))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads])


class Separate(Shared):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x[i]) for i, head in enumerate(self.heads)])


def sequential(*layers: Callable[[], nn.Module]) -> Member:
    return lambda: nn.Sequential(*(layer() for layer in layers))


KINDS: dict[str, tuple[Member, tuple[int, ...]]] = {
    "dropout": (sequential(lambda: nn.Linear(4, 5), nn.Dropout, lambda: nn.Linear(5, 2)), (6, 4)),
    "batch_norm_1d": (
        sequential(
            lambda: nn.Linear(4, 5), lambda: nn.BatchNorm1d(5), lambda: nn.ReLU(inplace=True), lambda: nn.Linear(5, 2)
        ),
        (6, 4),
    ),
    "cnn": (
        sequential(
            lambda: nn.Conv2d(3, 4, 3), lambda: nn.BatchNorm2d(4), nn.ReLU, lambda: nn.MaxPool2d(2), nn.Flatten,
            lambda: nn.Linear(36, 6), lambda: nn.LayerNorm(6),
        ),
        (5, 3, 8, 8),
    ),
    "conv_1d": (
        sequential(
            lambda: nn.Conv1d(4, 6, 3, groups=2, padding="same"), lambda: nn.GroupNorm(2, 6),
            lambda: nn.ConvTranspose1d(6, 4, 3, stride=2), lambda: nn.AdaptiveAvgPool1d(3),
        ),
        (5, 4, 8),
    ),
    "conv_3d": (sequential(lambda: nn.Conv3d(2, 3, 2), lambda: nn.BatchNorm3d(3), nn.GELU), (4, 2, 4, 4, 4)),
    "transposed_2d": (
        sequential(lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, output_padding=1, stride=2), nn.Tanh), (4, 4, 5, 5),
    ),
    "rms_norm": (
        sequential(lambda: nn.Linear(4, 8), lambda: nn.RMSNorm(8), lambda: nn.Softmax(1), lambda: nn.GLU(-1)), (5, 4),
    ),
    "instance_norm": (sequential(lambda: nn.Conv2d(3, 4, 3), lambda: nn.InstanceNorm2d(4, affine=True)), (5, 3, 8, 8)),
    "prelu": (sequential(lambda: nn.Linear(4, 8), lambda: nn.PReLU(8)), (5, 4)),
    "attention": (Attention, (2, 5, 8)),
    "multihead": (lambda: First(nn.MultiheadAttention(8, 2)), (5, 2, 8)),
    "encoder_layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    "lstm": (lambda: First(nn.LSTM(8, 6, 2, bidirectional=True)), (5, 2, 8)),
    "gru": (lambda: First(nn.GRU(8, 6, batch_first=True, bias=False)), (5, 2, 8)),
    "pooled": (Pooled, (3, 3, 8, 8)),
}  # fmt: skip


def example(kind: str, separate: bool) -> Tensor:
    return torch.randn(*((N,) if separate else ()), *KINDS[kind][1])


def fused(model: nn.Module, x: object, lowering: str = "bmm", **options: object) -> nn.Module:
    inputs = x if isinstance(x, tuple) else (x,)
    fast = fxopt.optimize(model, FuseEnsembles(Lowering(lowering)), example_inputs=inputs, **options)  # type: ignore[arg-type]
    assert any(d.status == "applied" for d in fxopt.plan(fast).decisions), fxopt.plan(fast).decisions
    return fast


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("separate", "training"), [(False, True), (True, False)])
def test_every_kind_is_fused_and_equivalent(kind: str, separate: bool, training: bool) -> None:
    torch.manual_seed(0)
    model = (Separate if separate else Shared)(KINDS[kind][0]).train(training)
    fast = fused(model, example(kind, separate))
    if kind != "dropout" or not training:
        inputs = (example(kind, separate),)
        assert_equivalent(model, fast, inputs, map_state=record_of(fast).state_map.forward)
    assert sum("heads" in str(n.target) and n.op == "call_module" for n in fxopt.graphs(fast)[""].nodes) <= 1


@pytest.mark.parametrize("kind", ["batch_norm_1d", "cnn", "rms_norm", "multihead", "pooled", "dropout"])
def test_the_whole_member_under_vmap(kind: str) -> None:
    torch.manual_seed(0)
    model = Shared(KINDS[kind][0]).eval()
    fast = fused(model, x := example(kind, False), "vmap")
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("separate", [False, True])
def test_embeddings(padding: int | None, separate: bool) -> None:
    def member() -> nn.Module:
        return nn.Sequential(nn.Embedding(10, 8, padding_idx=padding), nn.LayerNorm(8), nn.Linear(8, 3))

    model = (Separate if separate else Shared)(member)
    x = torch.randint(0, 10, (N, 2, 5) if separate else (2, 5))
    fast = fused(model, x)
    assert_equivalent(model, fast, (x,), map_state=record_of(fast).state_map.forward)


@pytest.mark.parametrize("kind", ["batch_norm_1d", "cnn", "conv_1d", "attention", "lstm", "multihead"])
def test_training_equals_training_the_members(kind: str, step: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = Shared(KINDS[kind][0]).double()
    inputs = [example(kind, False).double() for _ in range(20)]
    fast = fused(model, inputs[0])
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (fast, twin))
    for x in inputs:
        torch.testing.assert_close(step(fast, ours, x), step(twin, theirs, x), rtol=1e-9, atol=1e-9)
    saved = fxopt.state_dict(fast)
    assert list(saved) == list(twin.state_dict())
    for one, other in zip(saved.values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["cnn", "lstm", "multihead", "encoder_layer"])
def test_checkpoints_copies_and_restoring(kind: str) -> None:
    torch.manual_seed(0)
    model, other = Shared(KINDS[kind][0]), Shared(KINDS[kind][0])
    x = example(kind, False)
    with torch.no_grad():
        other(x)  # moves the running statistics
    fast = fused(model.eval(), x)
    other.eval()
    fast.load_state_dict(other.state_dict())
    torch.testing.assert_close(fast(x), other(x))
    torch.testing.assert_close(fxopt.state_dict(fast), other.state_dict())
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), fxopt.restore(fast)):
        torch.testing.assert_close(twin(x), other(x))
        torch.testing.assert_close(twin.heads[1](x), other.heads[1](x))
    with torch.no_grad():
        for parameter in fast.parameters():
            parameter.mul_(0.5)
        for parameter in other.parameters():
            parameter.mul_(0.5)
    torch.testing.assert_close(fast.heads[2](x), other.heads[2](x))


def test_running_statistics_are_live_views() -> None:
    model = Shared(KINDS["batch_norm_1d"][0])
    fast = fused(model, x := example("batch_norm_1d", False))
    fast(x), model(x)
    for mine, theirs in zip(fast.heads, model.heads, strict=True):
        torch.testing.assert_close(mine[1].running_mean, theirs[1].running_mean)
        assert int(mine[1].num_batches_tracked) == int(theirs[1].num_batches_tracked) == 1
    fast.heads[1][1].reset_running_stats()
    model.heads[1][1].reset_running_stats()
    torch.testing.assert_close(fast.eval()(x), model.eval()(x))


def test_members_have_to_agree_on_their_mode() -> None:
    model = Shared(KINDS["batch_norm_1d"][0])
    fast = fused(model, x := example("batch_norm_1d", False))
    fast.heads[1].eval()
    with pytest.raises(fxopt.FusedMemberError, match="set all to one mode"):
        fast(x)
    fast.heads.eval()
    torch.testing.assert_close(fast(x), model.eval()(x))


def test_a_cumulative_average_stays_as_it_was() -> None:
    model = Shared(sequential(lambda: nn.Linear(4, 5), lambda: nn.BatchNorm1d(5, momentum=None)))
    fast = fused(model, x := torch.randn(6, 4))
    torch.testing.assert_close(fast(x), model(x))
    assert sum(n.op == "call_module" for n in fxopt.graphs(fast)[""].nodes) == N


# -- unequal members -----------------------------------------------------------------------------------------------


class Unequal(nn.Module):
    """Two kinds of members in turn, on equal first layers."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 4, 3, 4, 3)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, s)) for s in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


@pytest.mark.parametrize("training", [True, False])
def test_unequal_members_are_fused_in_groups(training: bool) -> None:
    model = Unequal().train(training)
    x = torch.randn(4, 5)
    fast = fused(model, x)
    assert [d.status for d in fxopt.plan(fast).decisions] == ["applied"] * 3
    assert_equivalent(model, fast, (x,), map_state=record_of(fast).state_map.forward)
    assert sum("linear" in str(n.target) for n in fxopt.graphs(fast)[""].nodes) == 3


# -- heads that nobody called an ensemble --------------------------------------------------------------------------


class PolicyAndValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 6)
        self.policy_head = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        self.value_head = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.body(x))
        return self.policy_head(x), self.value_head(x)


def test_parallel_heads() -> None:
    model = PolicyAndValue().eval()
    fast = fused(model, x := torch.randn(4, 5))
    torch.testing.assert_close(fast(x), model(x))
    assert sum("linear" in str(n.target) for n in fxopt.graphs(fast)[""].nodes) == 2
    refused = fxopt.optimize(model.train(), FuseEnsembles(Lowering.BMM), example_inputs=(x,))
    assert ["gradients to some of them only" in d.reason for d in fxopt.plan(refused).decisions] == [True]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
        self.bn_left, self.bn_right = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.bn_left(self.left(x)).relu(), self.bn_right(self.right(x)).relu()], 1)


def test_parallel_branches() -> None:
    model = Branches()
    fast = fused(model, x := torch.randn(2, 3, 6, 6))
    assert_equivalent(model, fast, (x,), map_state=record_of(fast).state_map.forward)
    assert sum("convolve" in str(n.target) for n in fxopt.graphs(fast)[""].nodes) == 1


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return torch.softmax(q @ k.transpose(2, 3), -1) @ v


def test_projections_of_an_attention_layer() -> None:
    model = nn.Sequential(SelfAttention(), nn.Flatten())
    fast = fused(model, x := torch.randn(2, 5, 16))
    assert_equivalent(model, fast, (x,), map_state=record_of(fast).state_map.forward)
    assert sum("linear" in str(n.target) for n in fxopt.graphs(fast)["0"].nodes) == 1
    assert list(fxopt.state_dict(fast)) == list(model.state_dict())


# -- calls unlike the first ----------------------------------------------------------------------------------------


def test_members_of_another_rank_than_at_capture() -> None:
    model = Shared(Attention).eval()
    fast = fused(model, x := torch.randn(2, 5, 8))
    torch.testing.assert_close(fast(x), model(x))
    with pytest.raises(ValueError, match="unpack"):
        model(x[0])
    with pytest.raises(ValueError, match="unpack"):
        fast(x[0])


@pytest.mark.parametrize("kind", ["lstm", "gru", "transposed_2d"])
@pytest.mark.parametrize("separate", [False, True])
def test_without_a_batch_after_capture_with_one(kind: str, separate: bool) -> None:
    model = (Separate if separate else Shared)(KINDS[kind][0]).eval()
    x = example(kind, separate)
    fast = fused(model, x)
    dim = int(separate) + int(kind == "lstm")
    torch.testing.assert_close(fast(x.select(dim, 0)), model(x.select(dim, 0)))


class Scalars(nn.Module):
    """Members that give one number each, times a vector that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 1) for _ in range(N))
        self.register_buffer("scale", torch.randn(N))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).mean() * self.scale for layer in self.layers])


def test_single_numbers_times_a_shared_vector() -> None:
    model = Scalars()
    fast = fused(model, x := torch.randn(5, 4))
    torch.testing.assert_close(fast(x), model(x))


class Twice(nn.Module):
    """Members that are called twice, with statistics that depend on the order."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)) for _ in range(N))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([head(x).sin() + head(y) for head in self.heads])


def test_running_statistics_of_members_called_twice() -> None:
    model = Twice()
    inputs = torch.randn(6, 4), 3 + torch.randn(6, 4)
    fast = fused(model, inputs)
    for _ in range(3):
        torch.testing.assert_close(fast(*inputs), model(*inputs))
    for mine, theirs in zip(fast.heads, model.heads, strict=True):
        torch.testing.assert_close(mine[1].running_mean, theirs[1].running_mean)


@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"sparse": True}])
def test_embeddings_with_side_effects_stay(options: dict[str, object]) -> None:
    model = Shared(lambda: nn.Sequential(nn.Embedding(10, 8, **options), nn.Linear(8, 3)))  # type: ignore[arg-type]
    x = torch.randint(0, 10, (2, 5))
    fast = fxopt.optimize(model, FuseEnsembles(Lowering.BMM), example_inputs=(x,))
    torch.testing.assert_close(fast(x), model(x))
    assert not any("embed_members" in str(n.target) for n in fxopt.graphs(fast)[""].nodes)


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, 4, 5))
        self.layers = nn.ModuleList(nn.Linear(4, 2) for _ in range(N))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layers[i](F.linear(x, self.weight[i])) for i in range(N)])


def test_weights_picked_from_one_parameter() -> None:
    model = Places()
    fast = fused(model, x := torch.randn(3, 5))
    assert_equivalent(model, fast, (x,), map_state=record_of(fast).state_map.forward)
    assert sum("linear" in str(n.target) for n in fxopt.graphs(fast)[""].nodes) == 2


class Unweighted(nn.Module):
    """Attention that returns None beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("lowering", ["bmm", "vmap"])
@pytest.mark.parametrize("verify", [True, False])
def test_attention_without_its_weights(lowering: str, verify: bool) -> None:
    model, x = Shared(Unweighted), torch.randn(5, 2, 8)
    fast = fused(model, x, lowering, verify=verify)
    assert_equivalent(model, fast, (x,), map_state=record_of(fast).state_map.forward)


# -- without example inputs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cnn", "conv_1d", "lstm", "rms_norm", "batch_norm_1d"])
def test_the_rule_where_nothing_can_be_measured(kind: str) -> None:
    model = Shared(KINDS[kind][0])
    decisions = fxopt.plan(fxopt.optimize(model, "fuse_ensembles")).decisions
    decision = next(decision for decision in decisions if decision.label == "heads")
    if kind in ("rms_norm", "batch_norm_1d"):
        assert decision.status == "applied"
    else:
        assert decision.status == "refused" and "give example_inputs to measure it" in decision.reason
    named = fxopt.plan(fxopt.optimize(model, FuseEnsembles(Lowering.BMM))).decisions
    assert "applied" in [d.status for d in named if d.label == "heads"]


@pytest.mark.parametrize(("rows", "status"), [(2048, "applied"), (2049, "refused")])
def test_large_tables_are_left_alone_unmeasured(rows: int, status: str) -> None:
    model = Shared(lambda: nn.Sequential(nn.Embedding(rows, 8), nn.Linear(8, 3)))
    assert [d.status for d in fxopt.plan(fxopt.optimize(model, "fuse_ensembles")).decisions] == [status]


def test_members_that_check_what_they_are_given_are_fused() -> None:
    class Machines(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.members = nn.ModuleList(fxopt.layers.RBM(12, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([member(x) for member in self.members]).mean(0)

    model, x = Machines().eval(), torch.rand(5, 12).round()
    fast = fxopt.optimize(model, "fuse_ensembles{lowering=bmm}", example_inputs=(x,), measure=False)
    assert [decision.status for decision in fxopt.plan(fast).decisions] == ["applied"]
    torch.testing.assert_close(fast(x), model(x))
    for wrong in (x[:, :5], x[0, 0], [1.0]):
        with pytest.raises(fxopt.UsageError) as one:
            model(wrong)
        with pytest.raises(fxopt.UsageError) as other:
            fast(wrong)
        assert str(one.value) == str(other.value)

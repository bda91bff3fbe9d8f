"""fuse_ensembles on members of every kind: optimizer state, checkpoints, refusals, and applying it again."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.transforms.fuse_ensembles import FuseEnsembles, Lowering

N = 3


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2))


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 2))


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "convolution": (convolutional, lambda: torch.randn(6, 2, 5, 5, dtype=torch.float64)),
    "recurrent": (Recurrent, lambda: torch.randn(3, 4, 4, dtype=torch.float64)),
    "attention": (Attention, lambda: torch.randn(3, 4, 4, dtype=torch.float64)),
    "embedding": (embedding, lambda: torch.randint(0, 7, (3, 4))),
}


class Ensemble(nn.Module):
    def __init__(self, member: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(member() for _ in range(N))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads])


def made(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    member, example = KINDS[kind]
    return Ensemble(member).double(), example()


def optimized(model: nn.Module, x: Tensor, lowering: str = "bmm", **options: object) -> nn.Module:
    return fxopt.optimize(model, FuseEnsembles(Lowering(lowering)), example_inputs=(x,), **options)  # type: ignore[arg-type]


def fused(model: nn.Module, x: Tensor) -> nn.Module:
    fast = optimized(model, x)
    assert "applied" in [decision.status for decision in fxopt.plan(fast).decisions]
    return fast


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).sin().square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def assert_states_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-9, atol=1e-9)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_moves_over_in_the_middle_of_training(kind: str, name: str) -> None:
    """Five steps unfused, the optimizer's state translated, and twenty more: equal to twenty-five unfused ones."""
    model, _ = made(kind)
    inputs = [KINDS[kind][1]() for _ in range(25)]
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for x in inputs[:5]:
        step(model, optimizer, x)
    twin = copy.deepcopy(model)
    theirs = OPTIMIZERS[name](list(twin.parameters()))
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fast = fused(model, inputs[0])
    ours = fxopt.translate_optimizer(optimizer, fast)
    for x in inputs[5:]:
        torch.testing.assert_close(step(fast, ours, x), step(twin, theirs, x), rtol=1e-9, atol=1e-9)
    assert_states_close(fxopt.state_dict(fast), twin.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_go_both_ways(kind: str) -> None:
    model, x = made(kind)
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    for _ in range(3):
        step(other, optimizer, x)  # running statistics and their count move, too
    fast = fused(model, x)
    fast.load_state_dict(other.state_dict())
    step(fast, torch.optim.SGD(fast.parameters(), 0.1), x)
    step(other, optimizer, x)
    assert_states_close(fxopt.state_dict(fast), other.state_dict())
    fresh = copy.deepcopy(model)
    fresh.load_state_dict(fxopt.state_dict(fast))
    for twin in (fresh, fxopt.restore(fast)):
        assert_states_close(dict(twin.state_dict()), dict(other.state_dict()))
        torch.testing.assert_close(twin.eval()(x), other.eval()(x), rtol=1e-9, atol=1e-9)
    counts = {name: int(count) for name, count in fxopt.state_dict(fast).items() if name.endswith("batches_tracked")}
    assert counts == ({f"heads.{i}.1.num_batches_tracked": 4 for i in range(N)} if kind == "convolution" else {})


@pytest.mark.parametrize("kind", KINDS)
def test_twice_is_once_and_the_users_model_is_untouched(kind: str) -> None:
    model, x = made(kind)
    before = copy.deepcopy(model)
    once = fused(model, x)
    twice = optimized(once, x)
    assert {n: str(g) for n, g in fxopt.graphs(once).items()} == {n: str(g) for n, g in fxopt.graphs(twice).items()}
    assert_states_close(model.state_dict(), before.state_dict())
    assert [type(module) for module in model.modules()] == [type(module) for module in before.modules()]


# -- refusals ------------------------------------------------------------------------------------------------------


def refusal(model: nn.Module, x: Tensor, lowering: str = "bmm") -> str:
    """Return why the members as a whole are refused; what is found inside one of them is decided by itself."""
    fast = optimized(model, x, lowering)
    (decision,) = (decision for decision in fxopt.plan(fast).decisions if decision.label == "heads")
    assert decision.status == "refused"
    torch.testing.assert_close(fast(x), copy.deepcopy(model)(x))
    return decision.reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", [False, True])
def test_members_with_hooks(kind: str, inner: bool) -> None:
    model, x = made(kind)
    member = model.heads[1]
    module = next(iter(member.children())) if inner else member
    module.register_forward_hook(lambda *_: None)
    assert "it has hooks" in refusal(model, x)


@pytest.mark.parametrize("kind", KINDS)
def test_tied_parameters(kind: str) -> None:
    model, x = made(kind)
    name = next(iter(dict(model.heads[0].named_parameters())))
    path, _, last = name.rpartition(".")
    setattr(model.heads[2].get_submodule(path), last, model.heads[0].get_parameter(name))
    reason = refusal(model, x)
    assert "is tied to" in reason and "heads.0" in reason and "heads.2" in reason


def test_shared_buffers() -> None:
    model, x = made("convolution")
    model.heads[2][1].running_mean = model.heads[0][1].running_mean
    assert refusal(model, x) == "the parameter 'heads.0.1.running_mean' is tied to 'heads.2.1.running_mean'"


class Written(nn.Module):
    """Members that write into their own input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        x.add_(1)
        return y


class Deciding(nn.Module):
    """Members whose computation hangs on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if y.sum() > 0 else y * 2


@pytest.mark.parametrize("lowering", ["vmap", "bmm"])
@pytest.mark.parametrize("member", [Written, Deciding])
def test_members_that_cannot_be_vectorized(lowering: str, member: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = Ensemble(member), torch.randn(3, 4)
    fast = optimized(model, x.clone(), lowering)
    decisions = fxopt.plan(fast).decisions
    assert all(decision.status == "refused" and decision.reason for decision in decisions)
    for inputs in (x, -x):
        torch.testing.assert_close(fast(inputs.clone()), model(inputs.clone()))


@pytest.mark.parametrize("kind", KINDS)
def test_names_below_other_modules(kind: str) -> None:
    """Steps are made with names as seen from their owner, and hold for the whole model."""
    inner, x = made(kind)
    model = nn.Sequential(inner, nn.Identity())
    fast, old = fused(model, x), model.state_dict()
    new = [name for name, _ in (*fast.named_parameters(), *fast.named_buffers())]
    assert new and not any(name.startswith("0.heads.") for name in new)
    assert list(fast.state_dict()) == list(old)
    assert_states_close(fxopt.state_dict(fast), old)
    for parameter in fast.parameters():
        nn.init.zeros_(parameter)
    fast.load_state_dict(old)
    torch.testing.assert_close(fast.eval()(x), model.eval()(x))
    assert_states_close(fxopt.restore(fast).state_dict(), old)


def test_stacked_convolutions_are_laid_out_as_channels_last_as_their_members_are() -> None:
    plain, x = made("convolution")
    fast = fused(plain, x).to(memory_format=torch.channels_last)
    assert fast.heads[1][0].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(fast(x), plain(x), rtol=1e-9, atol=1e-9)

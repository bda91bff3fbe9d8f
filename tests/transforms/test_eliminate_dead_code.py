"""eliminate_dead_code: removes what nothing reads, keeps what does more than compute."""

from __future__ import annotations

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxopt
from fxopt.passes.pipeline import parse
from fxopt.testing import assert_equivalent
from fxopt.transforms.eliminate_dead_code import EliminateDeadCode


class Wasteful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        torch.relu(self.unused(x) + 1)
        return self.used(x)


class Effects(nn.Module):
    """Everything here is unused, and all of it must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.norm(x)
        self.drop(x)
        self.count.add_(1)
        torch.rand(3)
        return x * 2


def cleaned(model: nn.Module, *inputs: Tensor) -> nn.Module:
    return fxopt.optimize(model, "eliminate_dead_code", example_inputs=inputs)


def operations(model: nn.Module) -> list[str]:
    names = [getattr(node.target, "__name__", str(node.target)) for node in fxopt.graphs(model)[""].nodes]
    return [name for name in names if name != "output"]


def test_what_has_effects_in_training_only_stays_in_evaluation_too() -> None:
    model, x = Effects().eval(), torch.randn(6, 4)
    fast = fxopt.optimize(model, "eliminate_dead_code", example_inputs=(x,), verify=False)
    assert {"norm", "drop"} <= set(operations(fast))
    fast.train()(x), model.train()(x)
    torch.testing.assert_close(fast.norm.running_mean, model.norm.running_mean)


def test_the_graph_before_and_after() -> None:
    model = Wasteful()
    assert operations(fxopt.optimize(model, [], example_inputs=(torch.randn(2, 4),))) == [
        "x", "unused", "add", "relu", "used",
    ]  # fmt: skip
    assert operations(cleaned(model, torch.randn(2, 4))) == ["x", "used"]


def test_it_works_without_inputs() -> None:
    assert operations(fxopt.optimize(Wasteful(), "eliminate_dead_code")) == ["x", "used"]


def test_effects_stay_in_training() -> None:
    model = Effects()
    x = torch.randn(5, 4)
    fast = cleaned(model, x)
    assert operations(fast)[1:5] == ["norm", "drop", "count", "add_"]
    fast(x)
    assert fast.count == 1 and fast.norm.num_batches_tracked == 1


def test_the_random_stream_is_kept() -> None:
    model = Effects()
    x = torch.randn(5, 4)
    fast = cleaned(model, x)
    states = []
    for module in (model, fast):
        torch.manual_seed(3)
        module(x)
        states.append(torch.random.get_rng_state())
    assert torch.equal(*states)


def test_hooked_modules_stay() -> None:
    model = Wasteful()
    model.unused.register_forward_hook(lambda module, args, output: None)
    assert "unused" in operations(cleaned(model, torch.randn(2, 4)))


def test_numerics_and_gradients() -> None:
    model = Wasteful()
    fast = cleaned(model, torch.randn(2, 4))
    assert_equivalent(model, fast, (torch.randn(3, 4),))


def test_twice_is_once_and_checkpoints_survive() -> None:
    model = Wasteful()
    fast = cleaned(model, torch.randn(2, 4))
    again = cleaned(fast, torch.randn(2, 4))
    assert operations(again) == operations(fast)
    assert list(fxopt.state_dict(fast)) == list(model.state_dict())
    fast.load_state_dict(copy.deepcopy(model.state_dict()))


@given(st.just(EliminateDeadCode()))
def test_text_round_trip(pass_: EliminateDeadCode) -> None:
    assert parse(str(pass_)) == (pass_,)

"""Forwards that change parameters past their count of changes: nothing that optimize does leaves a trace of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime.graphs import capture_of
from fxopt.tracing.isolation import ModelState, ParameterData, restoring, trusted

X = torch.linspace(-1, 1, 12).reshape(3, 4)
DATA = torch.Tensor.data


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
        self.register_buffer("u", torch.randn(4))
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))


def halved(self: Any, x: Tensor) -> Tensor:
    self.weight.data.mul_(0.5)
    return x @ self.weight


def halved_afterwards(self: Any, x: Tensor) -> Tensor:
    y = x @ self.weight
    self.weight.data.mul_(0.5)
    return y


def halved_between(self: Any, x: Tensor) -> Tensor:
    y = x @ self.weight.exp()
    self.weight.data[0] = self.weight.data[1] * 0.5
    return y + x @ self.weight.exp()


def assigned(self: Any, x: Tensor) -> Tensor:
    self.weight.data = self.weight.data * 0.9
    return x @ self.weight


def assigned_in_a_child(self: Any, x: Tensor) -> Tensor:
    self.linear.weight.data = self.linear.weight.data * 0.9
    return self.linear(x)


def all_clipped(self: Any, x: Tensor) -> Tensor:
    for parameter in self.parameters():
        parameter.data.mul_(0.5).clamp_(-0.1, 0.1)
    return self.linear(x)


def as_an_array(self: Any, x: Tensor) -> Tensor:
    array = self.weight.detach().numpy()
    array *= 0.5
    return x @ self.weight


def through_a_view(self: Any, x: Tensor) -> Tensor:
    self.weight.view(-1).data[:3] *= 0.5
    return x @ self.weight


def spectral(self: Any, x: Tensor) -> Tensor:
    v = torch.mv(self.weight.data.t(), self.u)
    self.u.data = torch.mv(self.weight.data, v / v.norm())
    self.u.data /= self.u.data.norm()
    return x @ (self.weight / (self.u @ (self.weight @ v)))


def clipped_heads(self: Any, x: Tensor) -> Tensor:
    for head in self.heads:
        head.weight.data.mul_(0.5)
    return torch.stack([head(x) for head in self.heads])


def heads_clipped_afterwards(self: Any, x: Tensor) -> Tensor:
    y = torch.stack([head(x) for head in self.heads])
    for head in self.heads:
        head.weight.data.mul_(0.5)
    return y


FORWARDS = [
    halved, halved_afterwards, halved_between, assigned, assigned_in_a_child, all_clipped, as_an_array,
    through_a_view, spectral, clipped_heads, heads_clipped_afterwards,
]  # fmt: skip


def made(forward: Callable[..., Tensor]) -> nn.Module:
    return type(forward.__name__, (Layer,), {"forward": forward})()


def same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.allclose(one[name], other[name]) for name in one)


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "passes", [None, "eliminate_dead_code,eliminate_common_subexpressions,fold_constants", "fuse_ensembles"]
)
def test_the_same_as_eager_from_the_same_start(
    forward: Callable[..., Tensor], nested: bool, training: bool, passes: str | None
) -> None:
    model = made(forward).train(training)
    model = nn.Sequential(model, nn.Identity()).train(training) if nested else model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    memory = [parameter.data_ptr() for parameter in model.parameters()]
    reference = copy.deepcopy(model)
    if passes is None:
        fast = fxopt.capture(model, (X,)).model
        now: Callable[[], dict[str, Tensor]] = fast.state_dict
    else:
        fast = fxopt.optimize(model, passes, example_inputs=(X,))
        now = lambda: fxopt.state_dict(fast)  # noqa: E731
    assert same_state(model.state_dict(), before)
    assert [parameter.data_ptr() for parameter in model.parameters()] == memory
    assert same_state(now(), before)
    for _ in range(3):
        torch.testing.assert_close(fast(X), reference(X))
        assert same_state(now(), reference.state_dict())
    assert torch.Tensor.data is DATA


class Choosing(Layer):
    def forward(self, x: Tensor, double: bool = False) -> Tensor:
        self.weight.data.mul_(0.5)
        self.linear.weight.data = self.linear.weight.data + 1
        return self.linear(x @ self.weight) * (2 if double else 1)


class Halving(Layer):
    def forward(self, x: Tensor, double: bool = False) -> Tensor:
        self.weight.data.mul_(0.5)
        return x @ self.weight * (2 if double else 1)


@pytest.mark.parametrize("cls", [Choosing, Halving])
def test_calls_that_no_graph_fits_change_parameters_once(cls: type[nn.Module]) -> None:
    model = cls()
    reference = copy.deepcopy(model)
    fast = fxopt.optimize(model, "fold_constants", example_inputs=(X,))
    for double in (False, True, True, False, True):
        torch.testing.assert_close(fast(X, double), reference(X, double))
        assert same_state(fxopt.state_dict(fast), reference.state_dict())
    captured = fxopt.capture(cls(), (X,)).model
    reference = cls()
    for double in (False, True, True, False, True):
        torch.testing.assert_close(captured(X, double), reference(X, double))
        assert same_state(captured.state_dict(), reference.state_dict())
    if cls is Halving:
        assert capture_of(captured).specializations


def test_only_what_is_reached_for_is_copied() -> None:
    model = Layer()
    state = ModelState(model)
    with restoring(state):
        _ = torch.randn(3).data
        assert state.data.reached == []
        model.weight.data.zero_()
        assert [id(p) for p in state.data.reached] == [id(model.weight)]
        assert state.data.changed() == {id(model.weight)}
        other = ModelState(model)
        with restoring(other):
            model.linear.bias.data = torch.ones(4)
        assert not model.linear.bias.eq(1).all()
    assert state.data.changed() == set()
    assert torch.equal(model.weight, Layer().weight)
    assert torch.Tensor.data is DATA and "numpy" not in vars(torch.Tensor)


def test_what_others_put_on_tensors_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    def numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        reads.append(1)
        return torch._C.TensorBase.numpy(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "numpy", numpy, raising=False)
    with restoring(ModelState(Layer())):
        pass
    torch.ones(1).numpy()
    assert reads == [1] and vars(torch.Tensor)["numpy"] is numpy


def test_embeddings_that_shorten_their_rows_in_a_forward_are_left_as_they_were() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Embedding(10, 8, max_norm=0.5), nn.Linear(8, 8)).eval(), torch.arange(6)
    before = copy.deepcopy(model.state_dict())
    fast = fxopt.optimize(model, "pack", example_inputs=(x,), measure=False)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert torch.equal(fast.state_dict()[name], before[name])
    torch.testing.assert_close(fast(x), model(x))


def test_code_that_is_trusted_to_read_alone_is_not_watched() -> None:
    parameter = nn.Parameter(torch.ones(3))
    data = ParameterData([parameter])
    with data.watched():
        with trusted():
            parameter.detach().numpy()
        assert not data.reached
        parameter.detach().numpy()
        assert data.reached == [parameter]

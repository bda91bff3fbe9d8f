"""What a model's state dict holds, had in less time; models with their own way of making one are asked."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.runtime.values import ModelNames


class Shares(nn.Module):
    """Shared modules, tied tensors, names that stand for none, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = nn.Sequential(self.first, nn.BatchNorm1d(3))
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("scratch", torch.ones(1), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("none", None)


class Extra(nn.Linear):
    def get_extra_state(self) -> str:
        return "more"

    def set_extra_state(self, state: Any) -> None:
        assert state == "more"


def with_hook() -> nn.Module:
    def rename(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[f"{prefix}renamed"] = state.pop(f"{prefix}weight")

    model = nn.Linear(3, 3)
    model.register_state_dict_post_hook(rename)
    return nn.Sequential(model)


def replaced() -> nn.Module:
    def only_bias(self: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: t for name, t in nn.Module.state_dict(self, *args, **kwargs).items() if "bias" in name}

    model = nn.Linear(3, 3)
    model.state_dict = types.MethodType(only_bias, model)  # pyright: ignore[reportAttributeAccessIssue]
    return model


PLAIN = [Shares, lambda: nn.LSTM(2, 3), lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))]
OWN_WAY = [lambda: nn.Sequential(Extra(3, 3)), with_hook, replaced]


@pytest.mark.parametrize("make", PLAIN)
def test_the_state_of_plain_modules_is_what_torch_would_save(make: Callable[[], nn.Module]) -> None:
    model = make()
    state, expected = ModelNames(model).state(), model.state_dict(keep_vars=True)
    assert state is not None
    assert list(state) == list(expected)
    assert all(state[name] is tensor for name, tensor in expected.items())


@pytest.mark.parametrize("make", OWN_WAY)
def test_modules_with_their_own_way_are_asked(make: Callable[[], nn.Module]) -> None:
    model = make()
    assert ModelNames(model).state() is None
    fast = fxopt.optimize(model.eval(), "inference", example_inputs=(torch.ones(1, 3),), measure=False)
    assert list(fxopt.state_dict(fast)) == list(model.state_dict())


class ListsParameters(nn.Sequential):
    def parameters(self, recurse: bool = True) -> Any:
        return [{"params": list(super().parameters(recurse)), "lr": 0.1}]


def test_a_model_with_its_own_way_of_listing_parameters() -> None:
    model, x = ListsParameters(nn.Linear(3, 3), nn.Tanh()).eval(), torch.ones(1, 3)
    fast = fxopt.optimize(model, "eliminate_dead_code", example_inputs=(x,), verify=False)
    torch.testing.assert_close(fast(x), model(x))


def test_a_program_goes_by_the_model_as_it_is() -> None:
    program = fxopt.capture(nn.Sequential(nn.Linear(3, 3)), (torch.ones(1, 3),))
    other = nn.Linear(3, 3, bias=False)
    program.model.add_module("0", other)
    program.model.add_module("more", nn.Tanh())
    assert program.module("0") is other
    assert isinstance(program.module("more"), nn.Tanh)

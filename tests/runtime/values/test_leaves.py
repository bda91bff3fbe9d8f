"""Which modules are operations of their own, never looked into."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.layers import MixtureOfExperts
from fxopt.runtime.values import is_leaf
from fxopt.runtime.values.leaves import _GEOMETRIC


class Derived(MixtureOfExperts):
    """A layer of fxopt with a forward of the user's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize("cls", [MixtureOfExperts, Derived])
def test_a_layer_says_itself_that_it_is_an_operation(cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = cls(8, 16, num_experts=4, top_k=2)
    monkeypatch.setattr(cls, "__module__", "fxopt.moved")
    assert is_leaf(layer)
    assert is_leaf(layer.router)


def test_layers_that_passes_write_are_operations() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)), torch.randn(8, 16)
    masked = fxopt.optimize(model, "prune{scope=layer}", example_inputs=x, measure=False)
    assert is_leaf(masked[0]) and type(masked[0]) is not nn.Linear
    quantized = fxopt.optimize(model.eval(), "quantize{scheme=int8_dynamic}", example_inputs=x, measure=False)
    assert is_leaf(quantized[0]) and type(quantized[0]) is not nn.Linear


def test_the_models_of_users_are_looked_into() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    assert not is_leaf(Model())


@pytest.mark.parametrize("name", _GEOMETRIC)
def test_the_classes_of_pytorch_geometric_are_where_they_are_looked_for(name: str) -> None:
    pytest.importorskip("torch_geometric")
    place, _, cls = name.rpartition(".")
    assert getattr(importlib.import_module(place), cls).__module__ == place

"""Children that come in past attributes: under passes whose graphs compute what calls of them did."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from mixtures import WIDTH, Block
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import fxopt

X = torch.randn(2, 3, 6, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


class Conv(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5


class Norm(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5


PLACES: dict[str, type[nn.Module]] = {"conv": Conv, "norm": Norm, "layers.1": Linear, "head.2": Linear}


def by_register(model: nn.Module, path: str) -> None:
    """Put another module into the register, as torch's own quantization does."""
    parent, _, last = path.rpartition(".")
    new = copy.deepcopy(model.get_submodule(path))
    new.__dict__.pop("_fxopt_sealed", None)
    cast("Any", new).__class__ = PLACES[path]
    model.get_submodule(parent)._modules[last] = new


def by_class(model: nn.Module, path: str) -> None:
    """Change the class."""
    cast("Any", model.get_submodule(path)).__class__ = PLACES[path]


def by_derived_class(model: nn.Module, path: str) -> None:
    """Derive a class from the one that the module has, as parametrizations do."""
    module = model.get_submodule(path)
    old = type(module)
    cast("Any", module).__class__ = type("Half", (old,), {"forward": lambda self, x: old.forward(self, x) * 0.5})


def by_forward(model: nn.Module, path: str) -> None:
    """Put another forward before the class's, as libraries that move weights do."""
    module = model.get_submodule(path)
    forward = module.forward
    module.__dict__["forward"] = lambda x: forward(x) * 0.5


def by_settings(model: nn.Module, path: str) -> None:
    """Put a layer of the same class with other settings there."""
    parent, _, last = path.rpartition(".")
    old = cast("Any", model.get_submodule(path))
    torch.manual_seed(0)
    new: nn.Module = nn.BatchNorm2d(8, eps=0.5)
    if isinstance(old, nn.Conv2d):
        new = nn.Conv2d(3, 8, 3, padding=2)
    elif isinstance(old, nn.Linear):
        new = nn.Linear(old.in_features, old.out_features)
    model.get_submodule(parent)._modules[last] = new.eval()


@pytest.fixture(scope="module", params=["pack", "fold_batchnorm", "inference"])
def pair(request: pytest.FixtureRequest) -> tuple[Net, Net]:
    torch.manual_seed(0)  # of some networks all units are dead, and nothing that is replaced matters
    model = Net().eval()
    fast = fxopt.optimize(model, request.param, example_inputs=(X,), measure=False)
    torch.testing.assert_close(fast(X), model(X))
    return model, fast


@pytest.mark.parametrize("replace", [by_register, by_class, by_derived_class, by_forward, by_settings])
def test_the_new_child_answers(pair: tuple[Net, Net], replace: Callable[[nn.Module, str], None]) -> None:
    for path in PLACES:
        model, fast = map(copy.deepcopy, pair)
        fast(X)  # what is as it was is noted
        before = model(X)
        for each in (model, fast):
            replace(each, path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fxopt.GuardWarning)
            torch.testing.assert_close(fast(X), model(X))
        assert not torch.allclose(model(X), before)


def test_the_activation_of_stacked_experts() -> None:
    model, x = Block().eval(), torch.randn(6, WIDTH)
    fast = fxopt.optimize(model, "fuse_experts", example_inputs=x, measure=False)
    assert [each.status for each in fxopt.plan(fast).decisions] == ["applied"]
    for refused in (
        lambda: setattr(fast.experts, "act_fn", nn.ReLU()),
        lambda: fast.experts.act_fn.register_forward_hook(print),
    ):
        with pytest.raises(fxopt.FusedMemberError):
            refused()
    for each in (model, fast):
        each.experts._modules["act_fn"] = nn.ReLU()
    with pytest.warns(fxopt.GuardWarning, match="was replaced"):
        torch.testing.assert_close(fast(x), model(x))


def test_hooks_on_all_modules_run(pair: tuple[Net, Net]) -> None:
    called: list[str] = []
    handle = register_module_forward_hook(lambda module, *_: called.append(type(module).__name__))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fxopt.GuardWarning)
            for model in pair:
                model(X)
                called.append("")
    finally:
        handle.remove()
    half = len(called) // 2
    assert called[:half] == called[half:]
    torch.testing.assert_close(pair[1](X), pair[0](X))

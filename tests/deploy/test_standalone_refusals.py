"""What cannot be saved as standalone is refused by its name, line and reason, and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import fxopt
from fxopt.errors import ArchiveError


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Checked:
    value: Any

    def __post_init__(self):
        assert self.value is not None


class Pairing(nn.Module):
    def forward(self, x):
        return Pair(x, x + 1)


class Checking(nn.Module):
    def forward(self, x):
        return Checked(x)


class DataDependent(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum().item() > 0 else x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


class Custom(nn.Module):
    def forward(self, x):
        return Doubled.apply(x)


class Operator(nn.Module):
    def forward(self, x):
        return torch.ops.aten.add.Tensor(x, x)


class Private(nn.Module):
    def forward(self, x):
        return torch._softmax(x, 0, False)


class Method(nn.Module):
    def forward(self, x):
        return torch.tensor(x.data_ptr() % 1) + x


class Called(nn.Linear):
    def __call__(self, x):
        return super().__call__(x)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def hooked() -> nn.Module:
    linear = nn.Linear(3, 3)
    linear.register_forward_hook(lambda module, args, output: output * 2)
    return linear


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "data decides": (DataDependent, r"module 'inner' \(test_standalone_refusals.py:\d+\): .*by the data in a tensor"),
    "autograd function": (Custom, r"module 'inner' .*the custom autograd function Doubled"),
    "dispatched operator": (Operator, r"module 'inner' \(test_standalone_refusals.py:\d+\): it uses .*aten"),
    "private function": (Private, r"module 'inner' \(.*py:\d+\): it uses .*_softmax, which archives do not"),
    "method": (Method, r"module 'inner' \(.*py:\d+\): it calls .data_ptr, which archives do not"),
    "own __call__": (lambda: Called(3, 3), r"module 'inner': Called has a __call__ of its own"),
    "named tuple": (Pairing, r"named tuple Pair cannot be stored"),
    "dataclass with code": (Checking, r"it builds a Checked, which runs code when it is made"),
    "hooks": (hooked, r"module 'inner': it has hooks, which no graph runs"),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(3, 3)), r"module 'inner': it has parametrizations"),
    "replaced forward": (
        lambda: replaced(nn.Linear(3, 3)),
        r"module 'inner': its forward was replaced on the instance",
    ),
    "library module": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        r"module 'inner': archives hold no TransformerEncoderLayer, and TransformerEncoderLayer cannot be traced",
    ),
}


def replaced(module: nn.Module) -> nn.Module:
    module.forward = lambda x: x * 2
    return module


class Outer(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def refusal(model: nn.Module, path: Path) -> str:
    with pytest.raises(ArchiveError) as caught:
        fxopt.save(model, path, kind="standalone")
    assert not path.exists()
    assert caught.value.exit_code == 3
    assert str(caught.value).startswith("the model cannot be saved as standalone: ")
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_the_module_the_line_and_the_reason_are_named(name: str, tmp_path: Path):
    make, reason = REFUSED[name]
    model = Outer(make()).eval()
    width = 4 if name == "library module" else 3
    fast = fxopt.optimize(model, [], example_inputs=(torch.randn(2, 5, width),))
    assert re.search(reason, refusal(fast, tmp_path / "m")), refusal(fast, tmp_path / "m")


def test_a_model_that_was_not_captured(tmp_path: Path):
    assert "fxopt.optimize(model, [], example_inputs=...) makes one" in refusal(Outer(nn.Linear(3, 3)), tmp_path / "m")
    alone = fxopt.optimize(nn.Linear(3, 3), [], example_inputs=(torch.randn(2, 3),))
    assert "put it into a torch.nn.Sequential" in refusal(alone, tmp_path / "m")


def test_what_capture_gives_can_be_saved(tmp_path: Path):
    model = fxopt.capture(Outer(nn.Linear(3, 3)), (torch.randn(2, 3),)).model
    fxopt.save(model, tmp_path / "m", kind="standalone")
    x = torch.randn(4, 3)
    assert torch.equal(fxopt.load(tmp_path / "m")(x), model(x))


def test_a_mode_without_a_graph(tmp_path: Path):
    class Half(nn.Module):
        def forward(self, x):
            if self.training:
                return torch.from_numpy(x.detach().numpy() + 1)
            return x * 2

    model = fxopt.optimize(Outer(Half()).eval(), [], example_inputs=(torch.randn(2, 3),)).train()
    assert re.search(r"module 'inner': it has no graph for this call; .*self.training", refusal(model, tmp_path / "m"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda model: model.to("meta"), "is on the meta device"),
        (lambda model: setattr(model.inner, "weight", nn.Parameter(torch.eye(3).to_sparse())), "is sparse"),
        (
            lambda model: model.inner.register_buffer("odd", Odd(torch.ones(2))),
            "'inner.odd' is a Odd, not a plain tensor",
        ),
        (
            lambda model: model.register_buffer("view", model.inner.weight.data),
            "share their memory without being one tensor",
        ),
    ],
)
def test_tensors_that_cannot_be_stored(change: Callable[[Any], object], problem: str, tmp_path: Path):
    model = fxopt.optimize(Outer(nn.Linear(3, 3)), [], example_inputs=(torch.randn(2, 3),))
    change(model)
    with pytest.raises(ArchiveError, match=problem):
        fxopt.save(model, tmp_path / "m", kind="standalone")
    assert not (tmp_path / "m").exists()


class Odd(torch.Tensor):
    pass


def test_a_leaf_that_archives_do_not_hold_is_traced(tmp_path: Path):
    class Wide(nn.Linear):
        """A leaf, since it keeps its forward, of a class that nobody knows."""

    pruned = nn.Linear(2, 2)
    pruned.weight, pruned.bias = nn.Parameter(torch.randn(7, 2)), None
    model = nn.Sequential(Wide(3, 4), nn.GLU(), pruned, nn.Softplus())
    fast = fxopt.optimize(model.eval(), [], example_inputs=(torch.randn(2, 3),))
    fxopt.save(fast, tmp_path / "m", kind="standalone")
    flat = fxopt.load(tmp_path / "m")
    x = torch.randn(5, 3)
    assert torch.equal(flat(x), model(x))
    assert [type(child).__name__ for child in flat.children()] == ["Module", "GLU", "Module", "Softplus"]

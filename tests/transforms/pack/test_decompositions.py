"""pack on activations that are written out with no packed layer before them: one function of torch in their place."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.compat.packed import why_no_packing
from fxopt.errors import FusedMemberError
from fxopt.transforms.pack import Pack

pytestmark = pytest.mark.skipif(bool(why_no_packing(torch.float32)), reason=why_no_packing(torch.float32))

X = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))


class Written(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Behind(nn.Module):
    """Normalize, and activate by a module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(16), Written()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x)) + x


class Inline(nn.Module):
    def __init__(self, *, reads_gate: bool = False) -> None:
        super().__init__()
        self.norm, self.reads_gate = nn.LayerNorm(16), reads_gate

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        gate = torch.sigmoid(x)
        return gate * x + gate if self.reads_gate else gate * x


class Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


def functions(model: nn.Module, name: str = "") -> list[object]:
    return [node.target for node in fxopt.graphs(model)[name].nodes if node.op == "call_function"]


def packed(model: nn.Module, x: Tensor = X) -> nn.Module:
    return fxopt.optimize(model.eval(), Pack(), example_inputs=x, measure=False)


@pytest.mark.parametrize(("model", "function"), [(Behind(), F.gelu), (Inline(), F.silu), (Whole(), F.silu)])
def test_an_activation_becomes_one_function(model: nn.Module, function: object) -> None:
    fast = packed(model)
    assert function in functions(fast)
    assert not {torch.tanh, torch.sigmoid} & set(functions(fast))
    x = X.clone().requires_grad_()
    torch.testing.assert_close(fast(x), model(x))
    assert torch.autograd.grad(fast(x).sum(), [x])[0].isfinite().all()


def test_what_is_read_on_the_way_stays_written_out() -> None:
    fast = packed(Inline(reads_gate=True))
    assert F.silu not in functions(fast)


def test_behind_a_packed_layer_it_is_computed_by_that_alone() -> None:
    fast = packed(nn.Sequential(nn.Linear(16, 24), Written(), nn.Linear(24, 4)))
    assert [str(decision.site["owner"]) for decision in fxopt.plan(fast).decisions if decision.site] == [""]
    assert F.gelu not in functions(fast)


def test_behind_a_quantized_layer_it_becomes_one_function() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), Written(), nn.Linear(32, 16)).eval()
    fast = fxopt.optimize(model, "inference{dtype=int8}", example_inputs=X, measure=False)
    assert "gelu" in str(fxopt.graphs(fast)[""]) and "tanh(" not in str(fxopt.graphs(fast)[""])
    with torch.no_grad():
        assert (fast(X) - model(X)).abs().max() < 0.05 * model(X).abs().max()


def test_another_module_in_its_place_is_refused() -> None:
    fast = packed(Behind())
    with pytest.raises(FusedMemberError, match="'act' cannot be replaced"):
        fast.act = nn.Tanh()  # type: ignore[assignment]

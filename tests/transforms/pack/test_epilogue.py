"""What pack computes with linear layers: dropouts, gates and activations written out; and what stays in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.compat.packed import why_no_packing
from fxopt.transforms.pack import Pack

pytestmark = pytest.mark.skipif(bool(why_no_packing(torch.float32)), reason=why_no_packing(torch.float32))

needs_bfloat16 = pytest.mark.skipif(bool(why_no_packing(torch.bfloat16)), reason=why_no_packing(torch.bfloat16))

X = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))


def packed(model: nn.Module, x: Tensor = X, **options: object) -> nn.Module:
    return fxopt.optimize(model, Pack(**options), example_inputs=x, measure=False)  # type: ignore[arg-type]


def called(model: nn.Module, path: str = "") -> list[str]:
    nodes = fxopt.graphs(model)[path].nodes
    return [node.name for node in nodes if node.op in ("call_function", "call_module", "call_method")]


def same(one: nn.Module, other: nn.Module, x: Tensor = X) -> None:
    with torch.no_grad():
        torch.testing.assert_close(one(x), other(x))


class Residual(nn.Module):
    """A layer with dropout and a residual, as modules or as a function."""

    def __init__(self, *, function: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.dropout, self.norm = nn.Linear(16, 16), nn.Dropout(0.5), nn.LayerNorm(16)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        h = self.dense(x)
        h = F.dropout(h, 0.5, self.training) if self.function else self.dropout(h)
        return self.norm(h + x)


@pytest.mark.parametrize("function", [False, True])
def test_dropouts_and_residuals_are_one_call(function: bool) -> None:
    model = Residual(function=function).eval()
    fast = packed(model)
    assert called(fast) == ["packed_linear", "norm"]
    same(fast, model)


def in_training(model: nn.Module) -> Tensor:
    torch.manual_seed(3)
    return model(X)


@pytest.mark.parametrize("function", [False, True])
def test_dropouts_drop_in_training(function: bool) -> None:
    model = Residual(function=function).eval()
    fast = packed(model)
    assert torch.equal(in_training(fast.train()), in_training(model.train()))
    same(fast.eval(), model.eval())


def test_dropouts_that_are_set_to_training_by_themselves_drop() -> None:
    model = Residual().eval()
    fast = packed(model)
    for each in (model, fast):
        each.dropout.train()  # type: ignore[union-attr]
        each.dropout.p = 0.2  # type: ignore[union-attr]
    with torch.no_grad():
        assert torch.equal(in_training(fast), in_training(model))
        assert not torch.equal(fast(X), fast(X))


def test_hooks_on_a_dropout_that_is_left_out_are_refused() -> None:
    fast = packed(Residual().eval())
    with pytest.raises(fxopt.errors.FusedMemberError):
        fast.dropout.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]


def test_a_dropout_with_hooks_stays() -> None:
    model = Residual().eval()
    model.dropout.register_forward_hook(lambda *_: None)
    assert "dropout" in called(packed(model))


def test_dropouts_behind_activations() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 4), nn.Dropout(0.1)).eval()
    fast = packed(model)
    assert called(fast) == ["packed_linear", "packed_linear_1"]
    same(fast, model)


# -- activations written out -----------------------------------------------------------------------------------------


class NewGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class FastGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


class Exact(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class Almost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.05 * torch.pow(x, 3.0))))


def network(behind: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), behind, nn.Linear(24, 4)).eval()


@pytest.mark.parametrize("kind", [NewGELU, FastGELU, Exact, Swish])
def test_activations_that_are_written_out_are_computed_with_the_layer(kind: Callable[[], nn.Module]) -> None:
    model = network(kind())
    fast = packed(model)
    assert called(fast) == ["packed_linear", "packed_linear_1"]
    same(fast, model, X * 3)
    found, expected = (torch.autograd.grad(each(X).sum(), list(each.parameters())) for each in (fast, model))
    torch.testing.assert_close(found, expected)


def test_another_function_stays() -> None:
    assert called(packed(network(Almost()))) == ["packed_linear", "_1", "packed_linear_1"]


# -- gates -----------------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self, *, swapped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((16, 24), (16, 24), (24, 16)))
        self.swapped = swapped

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.up(x), F.silu(self.gate(x))
        return self.down(up * gate if self.swapped else gate * up)


@pytest.mark.parametrize("swapped", [False, True])
def test_products_of_layers_are_written_into_one(swapped: bool) -> None:
    model = Gated(swapped=swapped).eval()
    fast = packed(model)
    assert sorted(called(fast)) == ["packed_linear", "packed_linear_1", "packed_linear_2"]
    same(fast, model)
    same(fast, model, torch.randn(2, 3, 16))
    found, expected = (torch.autograd.grad(each(X).sum(), list(each.parameters())) for each in (fast, model))
    torch.testing.assert_close(found, expected)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.other = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x) * self.other(x)


def test_products_of_other_shapes_stay() -> None:
    model = Scaled().eval()
    fast = packed(model)
    assert called(fast) == ["packed_linear", "packed_linear_1", "mul"]
    same(fast, model)


# -- what stays in bfloat16 ------------------------------------------------------------------------------------------


def kernels(model: nn.Module) -> list[str]:
    with torch.no_grad():
        model(X)  # packs weights
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
            model(X)
    return [event.name for event in found.events()]


@needs_bfloat16
@pytest.mark.parametrize("model", [Gated(), network(nn.GELU()), network(NewGELU())], ids=["gated", "gelu", "written"])
def test_results_stay_narrow_between_layers(model: nn.Module) -> None:
    model.eval()
    fast = packed(model, dtype=torch.bfloat16, budget=0.05)
    count = sum("packed" in name for name in called(fast))
    layers = 2 if isinstance(model, Gated) else 1  # that read the model's own input, which is cast for each
    assert count == layers + 1
    assert kernels(fast).count("aten::_to_copy") == layers + 1
    with torch.no_grad():
        assert fast(X).dtype is torch.float32
        torch.testing.assert_close(fast(X), model(X), rtol=0.05, atol=0.02)


class ReadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h) + h.sum()


@needs_bfloat16
def test_what_others_read_is_float32() -> None:
    fast = packed(ReadTwice().eval(), dtype=torch.bfloat16, budget=0.05)
    assert kernels(fast).count("aten::_to_copy") == 4


@needs_bfloat16
def test_a_layer_that_trains_behind_one_that_does_not() -> None:
    model = network(nn.GELU())
    fast = packed(model, dtype=torch.bfloat16, budget=0.05)
    for each in (model, fast):
        each[0].requires_grad_(False)  # type: ignore[index]
    found, expected = (torch.autograd.grad(each(X).sum(), each[2].weight)[0] for each in (fast, model))  # type: ignore[index]
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@needs_bfloat16
def test_a_model_of_float32_takes_no_input_of_bfloat16() -> None:
    fast = packed(network(nn.GELU()), dtype=torch.bfloat16, budget=0.05)
    with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
        fast(X.bfloat16())

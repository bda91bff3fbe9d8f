"""quantize{scheme=int8_static}: layers that hold their inputs first, and heads that are tied to embeddings."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.cpus import needs_static_int8
from torch import Tensor, nn

import fxopt
from fxopt.compat.quantized import simulating, static_format
from fxopt.runtime.state import dequantized, quantized
from fxopt.transforms.quantize import Quantize

pytestmark = needs_static_int8
pytorch_utils: Any = pytest.importorskip("transformers.pytorch_utils")
X = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
WORDS = torch.arange(12).view(2, 6)


class Transposed(nn.Module):
    """Two layers with a ReLU between, which hold their inputs first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = pytorch_utils.Conv1D(96, 64), pytorch_utils.Conv1D(32, 96)
        for bias in (self.up.bias, self.down.bias):
            nn.init.normal_(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Speaker(nn.Module):
    """A head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.inner = nn.Embedding(48, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(words))))


def optimized(model: nn.Module, x: Tensor, **options: Any) -> Any:
    pass_ = Quantize(scheme="int8_static", **options)
    return fxopt.optimize(model, pass_, example_inputs=(x,), measure=False)


def run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def plainly(model: Transposed) -> nn.Sequential:
    """Return the same with layers that hold their outputs first."""
    up, down = nn.Linear(64, 96), nn.Linear(96, 32)
    for new, old in ((up, model.up), (down, model.down)):
        new.load_state_dict({"weight": old.weight.detach().t(), "bias": old.bias.detach()})
    return nn.Sequential(up, nn.ReLU(), down).eval()


@pytest.mark.parametrize("method", ["rtn", "smoothquant"])
def test_layers_with_inputs_first_compute_as_linear_layers_do(method: str):
    model = Transposed().eval()
    fast, other = optimized(model, X, method=method), optimized(plainly(model), X, method=method)
    assert type(fast.up).__name__ == type(fast.down).__name__ == "StaticLinear"
    assert torch.equal(run(fast, X), run(other, X))
    assert 0 < error(run(fast, X), run(model, X)) < 0.05
    assert fast.up.weight.shape == model.up.weight.shape == (64, 96)


def test_their_state_comes_and_goes_under_the_original_names(tmp_path: Path):
    model = Transposed().eval()
    fast = optimized(model, X)
    expected, state = run(fast, X), fast.state_dict()
    assert {name: each.shape for name, each in state.items()} == {n: t.shape for n, t in model.state_dict().items()}
    fast.load_state_dict(state)
    assert torch.equal(run(fast, X), expected)
    again = fxopt.restore(fast)
    assert type(again.up) is pytorch_utils.Conv1D and torch.equal(again.up.weight, state["up.weight"])
    fxopt.save(fast, tmp_path / "model.fxopt")
    loaded = fxopt.load(tmp_path / "model.fxopt", model=model)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), loaded):
        assert torch.equal(run(other, X), expected)


def test_what_compilers_get_of_them_is_what_the_kernels_compute():
    fast = optimized(Transposed().eval(), X)
    with simulating():
        expected = run(fast, X)
    assert error(run(fast, X), expected) < 0.02


def test_gradients_reach_their_inputs_and_biases():
    model = Transposed().eval()
    fast, x = optimized(model, X), X.clone().requires_grad_()
    fast(x).sum().backward()
    torch.testing.assert_close(fast.down.bias.grad, torch.full((32,), 6.0))
    expected = X.clone().requires_grad_()
    model(expected).sum().backward()
    assert error(cast("Tensor", x.grad), cast("Tensor", expected.grad)) < 0.2


def test_training_for_8_bits_leaves_them_with_a_reason():
    fast = fxopt.optimize(Transposed(), "qat", example_inputs=(X,))
    reasons = {decision.reason for decision in fxopt.plan(fast).decisions}
    assert reasons == {"it is a Conv1D of transformers, for which there is no layer that rounds while it is trained"}


def test_a_tied_head_keeps_its_weight_and_computes_in_8_bits():
    model = Speaker().eval()
    fast = optimized(model, WORDS)
    assert type(fast.head).__name__ == "TiedStaticLinear"
    assert fast.head.weight is fast.embedding.weight
    assert torch.equal(fast.state_dict()["head.weight"], model.state_dict()["head.weight"])
    hidden = torch.tanh(torch.randn(3, 32))
    found, expected = run(fast.head, hidden), run(model.head, hidden)
    assert 0 < error(found, expected) < 0.05
    held = quantized(fast.head.weight.detach(), static_format())
    wide = dequantized(*held, static_format(), torch.float32)
    assert error(found, fast.head.range.rounded(hidden) @ wide.T) < 1e-3
    with torch.no_grad():
        fast.embedding.weight.mul_(-2)  # it is made anew
    torch.testing.assert_close(run(fast.head, hidden), -2 * found, rtol=1e-5, atol=1e-5)
    again = fxopt.restore(fast)
    assert type(again.head) is nn.Linear and again.head.weight is again.embedding.weight
    copied = copy.deepcopy(fast)
    assert copied.head.weight is copied.embedding.weight
    assert torch.equal(run(copied.head, hidden), run(fast.head, hidden))


def test_an_archive_repeats_a_tied_head(tmp_path: Path):
    fast = optimized(Speaker().eval(), WORDS)
    fxopt.save(fast, tmp_path / "model.fxopt")
    loaded: Any = fxopt.load(tmp_path / "model.fxopt", model=Speaker().eval())
    assert type(loaded.head).__name__ == "TiedStaticLinear" and loaded.head.weight is loaded.embedding.weight
    assert torch.equal(run(loaded, WORDS), run(fast, WORDS))


def test_gradients_get_the_linear_layer_of_a_tied_head():
    model = Speaker().eval()
    fast = optimized(model, WORDS, keep="inner")
    hidden = torch.randn(3, 32, requires_grad=True)
    assert torch.equal(fast.head(hidden), model.head(hidden))


def test_a_tied_weight_stays_in_float_for_size():
    fast = optimized(Speaker().eval(), WORDS, aim="size")
    assert "its weight is tied to 'embedding.weight'" in {d.reason for d in fxopt.plan(fast).decisions}

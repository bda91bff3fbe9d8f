"""Layers with small numbers in the place of others: what forwards ask of them, and what would go wrong unheard."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.cpus import needs_static_int8
from torch import Tensor, nn

import fxopt
from fxopt.compat.quantized import simulating
from fxopt.errors import StateError, UsageError
from fxopt.transforms.quantize import Quantize, kernels

X = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
SCHEMES = ["int8_dynamic", pytest.param("int8_static", marks=needs_static_int8), "int8_weight", "int4_weight", "float8"]


class Asking(nn.Module):
    """Asks a weight for its type, shape and device, as T5's feed-forward does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wi, self.wo = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wi(x)
        if isinstance(self.wo.weight, Tensor) and x.dtype != self.wo.weight.dtype != torch.int8:
            x = x.to(self.wo.weight.dtype)
        return self.wo(x.to(self.wo.weight.device))[:, : self.wo.weight.shape[0]]


class Computing(Asking):
    """Computes with a weight itself, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.wo.weight.sum()


def quantized(model: nn.Module, scheme: Any = "int8_dynamic", x: Any = X, **options: Any) -> Any:
    pass_ = Quantize(scheme=scheme, aim="size", budget=0.5, **options)
    return fxopt.optimize(model.eval(), pass_, example_inputs=x)


def reasons(model: nn.Module) -> list[str]:
    return [decision.reason for decision in fxopt.plan(model).decisions if decision.status != "applied"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_forward_may_ask_a_weight_for_its_type(scheme: str, monkeypatch: pytest.MonkeyPatch):
    model = Asking()
    fast = quantized(model, scheme, **{"group_size": 32} if scheme == "int4_weight" else {})
    assert reasons(fast) == []
    for what in ("dtype", "device", "shape", "ndim", "is_meta", "requires_grad"):
        expected = False if what == "requires_grad" else getattr(model.wo.weight, what)
        assert getattr(fast.wo.weight, what) == expected, what
    assert fast.wo.weight.size(0) == 32 and fast.wo.weight.numel() == 2048 and isinstance(fast.wo.weight, Tensor)
    expected = fast(X)
    again = fxopt.optimize(fast, "inference", example_inputs=X)
    assert torch.equal(again(X), expected)
    program = torch.export.export(fast, (X,)).module()
    assert (program(X) - expected).abs().max() < 0.02 * expected.abs().max()
    monkeypatch.setattr(type(fast.wo), "wide_weight", None)  # nothing makes the weight for a question
    assert fast.wo.weight.dtype is torch.float32


def test_a_weight_that_is_computed_with_is_made():
    fast = quantized(Asking())
    weight = fast.wo.weight
    wide = fast.wo.wide_weight()
    for found in (weight.clone(), copy.deepcopy(weight), weight + 0, torch.from_numpy(weight.numpy()), weight[:]):
        assert type(found) is Tensor and torch.equal(found, wide)
    assert torch.equal(torch.cat([weight, weight])[:32], wide) and repr(weight) == repr(wide)
    assert torch.equal(nn.functional.linear(X @ wide, weight), X @ wide @ wide.T)
    assert reasons(quantized(Computing())) == ["'(root)' reads its weight"]


def test_a_transposed_weight_keeps_its_shape():
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    layer = pytorch_utils.Conv1D(64, 32)
    fast = quantized(nn.Sequential(layer, nn.Tanh()))
    assert fast[0].weight.shape == layer.weight.shape == fast[0].weight.clone().shape == (32, 64)


@needs_static_int8
def test_a_quantized_convolution_keeps_its_settings():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3))
    fast = quantized(model, "int8_static", torch.randn(2, 3, 8, 8))
    for name, value in {
        "stride": (2, 2),
        "padding": (0, 0),
        "dilation": 2,
        "groups": 2,
        "padding_mode": "circular",
    }.items():
        with pytest.raises(UsageError, match=f"is packed for its {name}; change it in the model before"):
            setattr(fast[0], name, value)
    fast[0].stride = (1, 1)
    assert copy.deepcopy(fast)[0].padding == (1, 1)


def test_a_wrong_kernel_for_lstms_is_found_out(monkeypatch: pytest.MonkeyPatch):
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    x = torch.randn(5, 3, 8)
    fast = quantized(Reader(), x=x)
    kind = next(each for each in type(fast.lstm).__mro__ if "kernel" in vars(each))
    right = kind.kernel
    assert reasons(fast) == []
    kernels._lstm_problem.cache_clear()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(kind, "kernel", lambda self, x, hx: right(self, x.flip(0), hx))
    assert "the kernel for an LSTM of 8 to 8 is off by" in reasons(quantized(Reader(), x=x))[0]
    kernels._lstm_problem.cache_clear()  # pyright: ignore[reportPrivateUsage]


def test_no_rows_are_simulated():
    fast = quantized(Asking())
    assert fast.wi.simulated(X[:0]).shape == (0, 64) and fast(X[:0]).shape == (0, 32)
    assert torch.compile(fast, backend="eager")(X[:0]).shape == (0, 32)


def test_a_checkpoint_that_is_not_finite_loads_nothing():
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Asking(), Asking()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model = Nested().eval()
    fast = quantized(model)
    before = {name: tensor.clone() for name, tensor in fast.state_dict().items()}
    wrong = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    wrong["second.wo.weight"][0, 0] = float("nan")
    for load in (fast.load_state_dict, lambda state: fxopt.load_state_dict(fast, state)):
        with pytest.raises(StateError, match=r"'second\.wo\.weight' has elements that are not finite"):
            load(wrong)
    after = fast.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    fast.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})
    assert not torch.equal(fast.state_dict()["first.wi.weight"], before["first.wi.weight"])


class Speaker(nn.Module):
    """Tie the weight of the head to the embedding, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(48, 32), nn.Linear(32, 32), nn.Linear(32, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.relu(self.inner(self.embedding(words))))


WORDS = torch.arange(12).view(2, 6)


def test_a_head_that_is_tied_keeps_its_weight_and_computes_in_int8():
    torch.manual_seed(0)
    model = Speaker().eval()
    fast = fxopt.optimize(model, "quantize", example_inputs=(WORDS,), measure=False)
    assert type(fast.head).__name__ == "TiedInt8Linear"
    assert fast.head.weight is fast.embedding.weight
    assert all(map(torch.equal, fast.state_dict()["head.weight"], model.state_dict()["head.weight"]))
    hidden = torch.randn(3, 32)
    with torch.no_grad():
        found, expected = fast.head(hidden), model.head(hidden)
        assert 0 < float((found - expected).abs().max()) < 0.02 * float(expected.abs().max())
        fast.embedding.weight.mul_(-2)  # it is made anew
        torch.testing.assert_close(fast.head(hidden), -2 * found, rtol=1e-5, atol=1e-5)
        again = fxopt.restore(fast)
    assert type(again.head) is nn.Linear and again.head.weight is again.embedding.weight
    copied = copy.deepcopy(fast)
    assert copied.head.weight is copied.embedding.weight
    with torch.no_grad():
        assert torch.equal(copied.head(hidden), fast.head(hidden))


def test_gradients_and_compilers_get_the_linear_layer_of_a_tied_head():
    model = Speaker().eval()
    fast = fxopt.optimize(model, "quantize{keep=inner}", example_inputs=(WORDS,), measure=False)
    hidden = torch.randn(3, 32, requires_grad=True)
    fast.head(hidden).sum().backward()
    assert torch.equal(fast.head(hidden), model.head(hidden))
    torch.testing.assert_close(fast.head.weight.grad, hidden.detach().sum(0).expand(48, 32))
    with torch.no_grad(), simulating():
        assert torch.equal(fast.head(hidden), model.head(hidden))
    with torch.no_grad():
        assert fast.head(hidden[:0]).shape == (0, 48)
        assert fast.head(torch.full((1, 32), float("nan"))).isnan().all()


def test_a_tied_weight_stays_in_float_for_size():
    fast = fxopt.optimize(Speaker().eval(), "quantize{aim=size}", example_inputs=(WORDS,))
    assert "its weight is tied to 'embedding.weight'" in reasons(fast)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_result_can_be_written_to(scheme: str):
    model, x = nn.Sequential(nn.Linear(32, 64)).eval(), X.view(2, 3, 32).clone().requires_grad_()
    fast = fxopt.optimize(model, f"quantize{{scheme={scheme},aim=size}}", example_inputs=x.detach(), measure=False)
    for given in (x, x[0]):
        result = fast(given)
        expected = torch.autograd.grad(result.mul(2).sum(), x, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(fast(given).mul_(2).sum(), x), expected)

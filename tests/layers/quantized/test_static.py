"""Layers of 8 bits on both sides: kernels beside what they stand for, to one step; pooling of numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cpus import needs_static_int8
from torch import Tensor, nn

from fxopt.compat.quantized import static_format
from fxopt.errors import GuardWarning, StateError
from fxopt.layers.quantized import (
    Range,
    StaticConv,
    StaticLayer,
    StaticLinear,
    from_numbers,
    max_pool_numbers,
    to_numbers,
)
from fxopt.passes.rewriting import layer_of
from fxopt.runtime.state import FORMATS

OF_INPUT = Range(0.03, 120)
CONVOLUTIONS = {
    "plain": nn.Conv2d(3, 8, 3),
    "strided": nn.Conv2d(3, 8, 3, stride=2, padding=1),
    "depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
    "dilated": nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2),
    "same": nn.Conv2d(3, 8, 3, padding="same"),
    "1d": nn.Conv1d(4, 8, 3, padding=1),
    "3d": nn.Conv3d(2, 4, 3),
}


def numbers_of(weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return a weight as whole numbers and scales, one for each output or one for all."""
    rows = weight.detach().flatten(1) if count > 1 else weight.detach().reshape(1, -1)
    scales = rows.abs().amax(1) / FORMATS[static_format()]
    spread = scales.reshape(-1, *[1] * (weight.ndim - 1))
    return (weight.detach() / spread).round().to(torch.int8), scales


def static_of(layer: Any, count: int = 8) -> StaticLayer:
    settings = *numbers_of(layer.weight, count), layer.bias, layer.weight.dtype, OF_INPUT
    if isinstance(layer, nn.Linear):
        return StaticLinear(*settings)
    call = layer_of(layer)
    assert call is not None
    assert call.geometry is not None
    return StaticConv(*settings, call.geometry)


def inputs_of(layer: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if isinstance(layer, nn.Linear):
        return torch.randn(5, layer.in_features, generator=generator)
    return torch.randn(2, layer.in_channels, *[7] * len(layer.kernel_size), generator=generator)


def simulated(layer: StaticLayer, like: Any, x: Tensor) -> Tensor:
    """Compute in float64 what a layer stands for, by torch's own layer."""
    other = copy.deepcopy(like).double()
    other.weight.data = layer.weight.double()
    return other(from_numbers(to_numbers(x, 0.03, 120), OF_INPUT, torch.float64))


@needs_static_int8
def test_a_weight_is_packed_for_each_of_a_few_shapes():
    layer = static_of(CONVOLUTIONS["plain"])
    images = [torch.randn(rows, 3, size, size) for rows in (1, 2) for size in (7, 9, 12)]
    with torch.no_grad():
        first = [layer(x) for x in images]
        assert all(torch.equal(layer(x), found) for x, found in zip(images, first, strict=True))
        kept = layer.packing.last(key=images[-1].shape)
        layer(images[-1])
        assert layer.packing.last(key=images[-1].shape) is kept is not None
        assert layer.packing.last(key=images[0].shape) is None, "the first shape has gone for later ones"
        layer.weight_scales.mul_(2)
        assert not torch.equal(layer(images[-1]), first[-1])


@needs_static_int8
@pytest.mark.parametrize("layer", [nn.Linear(16, 8), *CONVOLUTIONS.values()], ids=["linear", *CONVOLUTIONS])
@pytest.mark.parametrize("count", [1, 8])
def test_kernels_compute_what_they_stand_for(layer: Any, count: int):
    static, x = static_of(layer, count), inputs_of(layer)
    with torch.no_grad():
        found, expected = static(x), simulated(static, layer, x)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
        assert found.stride() == layer(x).stride()
        numbers = static(x, output=(0.02, 7))
        steps = (numbers.double() - (expected / 0.02 + 7).round().clamp(0, 255)).abs()
        assert steps.max() <= 1
        if not isinstance(layer, nn.Conv3d):
            assert torch.equal(static(x, activation="relu"), found.relu())


def test_numbers_that_come_in_are_read_by_the_layers_own_range():
    static, x = static_of(nn.Linear(16, 8)), inputs_of(nn.Linear(16, 8))
    with torch.no_grad():
        assert torch.equal(static(to_numbers(x, 0.03, 120)), static(x))


def test_numbers_made_in_one_pass_are_those_of_plain_operators(recwarn: pytest.WarningsRecorder):
    x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, torch.tensor([[0.0, 1e30, -1e30], [float("inf"), -float("inf"), 7.0]])])
    found = to_numbers(x, 0.03, 120)
    expected = (x.double() / 0.03 + 120).round().clamp(0, 255)
    assert found.dtype is torch.uint8
    assert torch.equal(found.double(), expected)
    assert torch.equal(to_numbers(x.double(), 0.03, 120), found)  # of another type: no kernel
    assert torch.equal(to_numbers(x.t(), 0.03, 120), found.t())
    assert not recwarn.list  # PyTorch says of the tensors in between that they will go


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_other_types_get_what_the_kernels_stand_for(kind: torch.dtype):
    layer = nn.Conv2d(3, 8, 3)
    static, x = static_of(layer), inputs_of(layer)
    with torch.no_grad():
        expected = simulated(static, layer, x)
        assert (static(x.to(kind)) - expected).abs().max() < 0.05 * expected.abs().max()


@needs_static_int8
def test_exporters_get_what_the_kernels_stand_for():
    layer = nn.Linear(16, 8)
    static, x = static_of(layer), inputs_of(layer)
    with torch.no_grad():
        exported = torch.export.export(static, (x,))
        assert "onednn" not in str(exported.graph)
        assert (exported.module()(x) - static(x)).abs().max() < 0.01 * static(x).abs().max()


def test_gradients_flow_to_the_input_and_the_bias():
    layer = nn.Linear(16, 8)
    static, x = static_of(layer), inputs_of(layer).requires_grad_()
    static(x, activation="relu", output=(0.02, 0)).sum().backward()
    assert x.grad is not None and layer.bias.grad is not None
    expected = torch.autograd.grad(F.relu(F.linear(x, static.weight, layer.bias)).sum(), [x])[0]
    assert (x.grad - expected).abs().max() < 0.2 * expected.abs().max()


def test_an_activation_is_cut_off_at_the_ends_of_its_range():
    x = torch.tensor([-100.0, 0.0, 0.031, 100.0], requires_grad=True)
    rounded = OF_INPUT.rounded(x)
    assert rounded.tolist() == pytest.approx([-120 * 0.03, 0.0, 0.03, 135 * 0.03])
    rounded.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 1, 1, 0]


def test_the_ends_of_a_range_have_slopes():
    x = torch.tensor([-120 * 0.03, 135 * 0.03, -120.4 * 0.03, 135.4 * 0.03, -121 * 0.03, 136 * 0.03]).requires_grad_()
    OF_INPUT.rounded(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1, 1, 1, 0, 0]


@needs_static_int8
def test_gradients_of_gradients():
    layer = nn.Linear(16, 8)
    static, before = static_of(layer), inputs_of(layer).requires_grad_()
    (first,) = torch.autograd.grad(static(before.sin()).square().sum(), [before], create_graph=True)
    (found,) = torch.autograd.grad(first.square().sum(), [before])
    expected = before.detach().requires_grad_()
    own = F.linear(OF_INPUT.rounded(expected.sin()), static.weight, layer.bias).square().sum()
    (first,) = torch.autograd.grad(own, [expected], create_graph=True)
    (wanted,) = torch.autograd.grad(first.square().sum(), [expected])
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize(
    ("scale", "zero_point"),
    [(0.0, 3), (-1.0, 3), (float("nan"), 3), (float("inf"), 3), ("x", 3), (0.1, -1), (0.1, 256), (0.1, 1.5)],
)
def test_a_range_that_is_none_is_told(scale: Any, zero_point: Any):
    with pytest.raises(StateError, match="of an activation is"):
        Range(scale, zero_point)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [([2, 2], [2, 2], [0, 0]), ([3, 3], [2, 2], [1, 1]), ([3, 2], [1, 2], [0, 1])]
)
def test_numbers_are_pooled_like_floats(kernel: list[int], stride: list[int], padding: list[int]):
    numbers = torch.randint(0, 256, (2, 3, 40, 41), dtype=torch.uint8)  # torch's own fails for more than 255 places
    expected = F.max_pool2d(numbers.float(), kernel, stride, padding)
    assert torch.equal(max_pool_numbers(numbers, kernel, stride, padding).float(), expected)
    assert torch.equal(max_pool_numbers(numbers.float(), kernel, stride, padding), expected)


def test_geometry_that_kernels_lack_is_told():
    reflecting, uneven = (
        layer_of(conv)
        for conv in (nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"), nn.Conv2d(3, 3, (2, 3), padding="same"))
    )
    assert reflecting is not None
    assert uneven is not None
    assert uneven.geometry is not None
    assert reflecting.geometry is None
    assert (uneven.geometry.padding, uneven.geometry.padding_after) == ((0, 1), (1, 1))


@pytest.mark.parametrize("grad", [False, True])
def test_results_have_the_type_of_autocast(grad: bool):
    values, scales = numbers_of(torch.randn(8, 16), 8)
    layer = StaticLinear(values, scales, nn.Parameter(torch.zeros(8)), torch.float32, Range(0.05, 128))
    x = torch.randn(3, 16, requires_grad=grad)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    if grad:
        found.float().sum().backward()
        assert x.grad is not None and torch.allclose(x.grad[0], layer.weight.sum(0), atol=0.1)


@pytest.mark.parametrize("kind", ["linear", "plain"])
def test_numbers_whose_sums_overflow_here_are_computed_in_floats(kind: str, monkeypatch: pytest.MonkeyPatch):
    layer: Any = nn.Linear(16, 8) if kind == "linear" else CONVOLUTIONS[kind]
    x, static = inputs_of(layer), static_of(layer)
    static.held[0].flatten()[0] = 127
    monkeypatch.setattr("fxopt.layers.quantized.static.static_format", lambda: "int7")
    monkeypatch.setattr("fxopt.compat.quantized.static_format", lambda: "int7")
    monkeypatch.setattr(static.computation, "kernel", lambda *_: pytest.fail("its sums overflow"))
    with pytest.warns(GuardWarning, match="computes in floats, since its weight has 8 bits"):
        found = static(x)
    assert torch.equal(found, static(x))  # it is said once
    assert torch.allclose(found, static(x.double()).float(), atol=1e-5)

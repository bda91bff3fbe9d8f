"""Linear layers with small numbers: the shapes that their kernels take, and the types that they return."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxopt.layers.quantized import Float8Linear, Int4WeightLinear, Int8DynamicLinear, Int8WeightLinear, QuantizedLinear
from fxopt.passes.state import quantized

WIDTHS = [(Int8DynamicLinear, inputs) for inputs in (1, 15, 17)]
WIDTHS += [(Int8WeightLinear, inputs) for inputs in (1, 8, 15, 16, 17, 24, 70)]
WIDTHS += [(Int4WeightLinear, inputs) for inputs in (32, 96)]


def layer_of(kind: type[QuantizedLinear], inputs: int, outputs: int) -> QuantizedLinear:
    torch.manual_seed(0)
    numbers = quantized(torch.randn(outputs, inputs), kind.form, 32 if kind is Int4WeightLinear else 0)
    return kind(*numbers, nn.Parameter(torch.randn(outputs)), torch.float32)


@pytest.mark.parametrize(("kind", "inputs"), WIDTHS)
def test_kernels_take_every_width_and_layout(kind: type[QuantizedLinear], inputs: int):
    for outputs in (16, 32) if kind is Int4WeightLinear else (1, 7, 32):
        layer = layer_of(kind, inputs, outputs)
        wide = torch.randn(5, 2 * inputs)
        for x in (wide[:1, ::2], wide[:, ::2], wide[:0, ::2], wide.bfloat16()[:, ::2], wide[0, ::2]):
            with torch.no_grad():
                found, expected = layer(x), layer.in_floats(x)
            scale = float(torch.nn.functional.linear(x.abs().float(), layer.weight.abs()).sum())
            assert found.shape == expected.shape
            assert torch.allclose(found.float(), expected.float(), atol=0.02 * (1 + scale), rtol=0)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [Int8DynamicLinear, Int8WeightLinear, Int4WeightLinear, Float8Linear])
def test_results_have_the_type_of_autocast(kind: type[QuantizedLinear], grad: bool):
    layer, plain = layer_of(kind, 64, 32), nn.Linear(64, 32)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 64, dtype=dtype, requires_grad=grad)
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
            found = layer(x)
            assert found.dtype == plain(x).dtype == torch.bfloat16
        if grad:
            found.float().sum().backward()
            assert x.grad is not None and torch.allclose(x.grad.float()[0], layer.weight.sum(0), atol=0.2)

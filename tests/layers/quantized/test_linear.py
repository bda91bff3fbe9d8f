"""Linear layers with small numbers: the shapes that their kernels take, and the types that they return."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxopt.compat import quantized as quantized_kernels
from fxopt.errors import UsageError
from fxopt.layers.quantized import (
    Float8Linear,
    Int4WeightLinear,
    Int8DynamicLinear,
    Int8WeightLinear,
    QuantizedLinear,
    TiedInt8Linear,
)
from fxopt.runtime.state import quantized

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


def test_a_weight_is_not_replaced():
    layer = layer_of(Int8WeightLinear, 16, 8)
    for value in (nn.Parameter(torch.ones(8, 16)), torch.ones(8, 16)):
        with pytest.raises(UsageError, match="'weight' of this Int8WeightLinear is made of small numbers"):
            layer.weight = value
    layer.bias = nn.Parameter(torch.ones(8))


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


@pytest.mark.parametrize("has_amx", [False, True])
def test_int8_gives_a_row_the_same_whatever_is_beside_it(has_amx: bool, monkeypatch: pytest.MonkeyPatch):
    if has_amx and (reason := quantized_kernels.why_no_static_int8()):
        pytest.skip(reason)
    monkeypatch.setattr(quantized_kernels, "_has_amx", lambda: has_amx)
    layer = layer_of(Int8DynamicLinear, 48, 24)
    x = torch.randn(2, 5, 48) * torch.logspace(-6, 6, 5)[:, None]  # each row is as precise as the others
    x[0, 0] = 0
    with torch.no_grad():
        found, expected, simulated = layer(x), layer.in_floats(x), layer.simulated(x)
        assert torch.equal(layer(x[1, 1]), found[1, 1]) and torch.equal(layer(x[:, 1:2]), found[:, 1:2])
    assert torch.equal(found[0, 0], layer.bias)
    of_rows = (found - expected).abs().amax(-1) / (expected - layer.bias).abs().amax(-1).clamp(min=1.0)
    assert 0 < of_rows.max() < 0.03
    assert torch.allclose(found, simulated, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("has_amx", [False, True])
@pytest.mark.parametrize("kind", [Int8DynamicLinear, TiedInt8Linear])
def test_a_row_that_is_not_finite_is_computed_in_floats_alone(
    kind: type[nn.Module], has_amx: bool, monkeypatch: pytest.MonkeyPatch
):
    if has_amx and (reason := quantized_kernels.why_no_static_int8()):
        pytest.skip(reason)
    monkeypatch.setattr(quantized_kernels, "_has_amx", lambda: has_amx)
    tied = TiedInt8Linear(nn.Parameter(torch.randn(24, 48)), nn.Parameter(torch.randn(24)), 0)
    layer = tied if kind is TiedInt8Linear else layer_of(Int8DynamicLinear, 48, 24)
    x = torch.randn(2, 5, 48)
    odd = x.clone()
    odd[0, 1, 3], odd[1, 4, 0], odd[1, 0] = float("nan"), float("inf"), float("-inf")
    with torch.no_grad():
        found, expected = layer(odd), layer(x)
        floats = nn.functional.linear(odd, layer.weight, layer.bias)
    rows = torch.ones(2, 5, dtype=torch.bool)
    for place in ((0, 1), (1, 4), (1, 0)):
        rows[place] = False
        assert torch.equal(found[place].isnan(), floats[place].isnan()) and not found[place].isfinite().any()
    assert torch.equal(found[rows], expected[rows])
    assert torch.equal(odd[0, 1].isnan().sum(), torch.tensor(1))  # what was given stays


@pytest.mark.parametrize("outputs_share", [False, True])
def test_float8_multiplies_rows_with_scales_of_their_own(outputs_share: bool):
    torch.manual_seed(0)
    numbers = quantized(torch.randn(48, 32), "float8", -1 if outputs_share else 0)
    layer = Float8Linear(*numbers, nn.Parameter(torch.randn(48)), torch.float32)
    x = torch.randn(2, 5, 32) * torch.logspace(-6, 6, 5)[:, None]  # each row is as precise as the others
    x[0, 0] = 0
    with torch.no_grad():
        found, expected = layer.product(x), layer.in_floats(x)
    assert found.shape == expected.shape and found.dtype == x.dtype
    of_rows = (found - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert 0 < of_rows.max() < 0.1
    assert torch.equal(layer(x), layer.in_floats(x))  # this device does not multiply float8


@pytest.mark.gpu
def test_float8_on_a_gpu_computes_what_it_stands_for():
    layer = layer_of(Float8Linear, 64, 32).cuda()
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU multiplies no float8")
    x = torch.randn(130, 64, device="cuda", requires_grad=True)
    with torch.no_grad():
        found, expected = layer(x), layer.simulated(x)
    assert (found - layer.in_floats(x)).abs().max() > 0
    assert (found - expected).abs().max() < 2**-6 * expected.abs().max()
    layer(x).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad[0], layer.weight.sum(0), atol=0.2)
    narrow = layer_of(Float8Linear, 40, 7).cuda()
    assert torch.equal(narrow(x[:, :40]), narrow.in_floats(x[:, :40]))


@pytest.mark.parametrize("modes", [True, False])
def test_a_bias_that_a_fused_optimizer_wrote_is_packed_anew(modes: bool):
    layer, x = layer_of(Int8DynamicLinear, 16, 4).eval(), torch.randn(3, 16)
    optimizer = torch.optim.Adam(layer.parameters(), lr=5.0, fused=True)
    with torch.no_grad():
        layer(x)
    (layer.train() if modes else layer)(x).sum().backward()
    optimizer.step()  # raises no version
    with torch.no_grad():
        assert torch.allclose(layer.eval()(x) if modes else layer(x), layer.in_floats(x), atol=0.5)


@pytest.mark.parametrize("kind", [Int8DynamicLinear, Int8WeightLinear, Int4WeightLinear])
def test_numbers_that_are_written_past_torch_are_packed_anew(kind: type[QuantizedLinear]):
    layer, x = layer_of(kind, 64, 32), torch.randn(3, 64)
    with torch.no_grad():
        before = layer(x)
        version = layer.weight_scales._version
        layer.weight_scales.data.mul_(2)
        assert layer.weight_scales._version == version
        found = layer(x) - layer.bias
    torch.testing.assert_close(found, 2 * (before - layer.bias), rtol=0.05, atol=0.05)

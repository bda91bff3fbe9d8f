"""Activations behind packed kernels: written into a new result, or into a part of one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxopt.compat.packed import why_no_packing
from fxopt.layers.packed import Activation, Geometry, PackedConvolution, known_activations

needs_packing = pytest.mark.skipif(bool(why_no_packing(torch.float32)), reason=why_no_packing(torch.float32))

NUMBERS = {"leaky_relu": [(0.1,), (0.0,)], "hardtanh": [(-1.0, 2.0), (0.5, 0.5)]}
ACTIVATIONS = [each.having(numbers) for each in known_activations() for numbers in NUMBERS.get(each.operator, [()])]
ALONE = [each for each in ACTIVATIONS if not each.kernel]


def odd(dtype: torch.dtype) -> Tensor:
    """Return numbers around zero, with both zeros, what is not finite, and what is not a number in either sign."""
    special = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 6.0, 3e38, -3e38])
    return torch.cat([torch.linspace(-8, 8, 33), special]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda each: f"{each}{each.kind}{each.numbers}")
def test_what_is_written_is_what_torch_computes(activation: Activation, dtype: torch.dtype) -> None:
    expected, x = activation(odd(dtype)), odd(dtype)
    found = activation.in_place(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit() & ~found.isnan(), expected.signbit() & ~expected.isnan())


def test_a_hardtanh_without_numbers_in_between_is_refused_as_torch_refuses_it() -> None:
    hardtanh = next(each for each in known_activations() if each.operator == "hardtanh").having((1.0, -1.0))
    with pytest.raises(ValueError, match="min_val cannot be greater than max_val"):
        hardtanh.in_place(torch.ones(2))


@needs_packing
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("activation", ALONE, ids=str)
def test_a_part_of_a_result_lies_channels_last(activation: Activation, images: int) -> None:
    geometry = Geometry((2, 2), (0, 0), (1, 1), 1, padding_after=(1, 1))
    x, weight = torch.randn(images, 4, 8, 10), torch.randn(6, 4, 3, 3)
    x[0, 1, 2, 3], x[0, 1, 6, 7] = torch.nan, torch.inf
    with torch.no_grad():
        found = PackedConvolution(geometry, activation)(x, weight)
        expected = activation(F.conv2d(F.pad(x, (0, 1, 0, 1)), weight, stride=2))
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-4)

"""Linear layers on transposed weights: what they compute at one row and at others, and what they keep."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from fxopt.compat.packed import why_no_packing
from fxopt.layers.packed import NO_ACTIVATION, Activation, PackedLinear, TransposedLinear, known_activations

pytestmark = pytest.mark.skipif(bool(why_no_packing(torch.float32)), reason=why_no_packing(torch.float32))

ROW = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(0))
GELU = next(each for each in known_activations() if each.kind == "tanh" and each.operator == "gelu")


def tensors(outputs: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(outputs, 16, generator=generator), torch.randn(outputs, generator=generator)


@pytest.mark.parametrize("shape", [(16,), (1, 16), (1, 1, 16), (3, 16), (0, 16)], ids=str)
@pytest.mark.parametrize("activation", [NO_ACTIVATION, GELU], ids=str)
def test_transposed_weights_compute_what_the_layer_does(shape: tuple[int, ...], activation: Activation) -> None:
    x, (weight, bias) = torch.randn(shape), tensors()
    layer = TransposedLinear(activation)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, weight, bias), layer.plainly(x, weight, bias))
        torch.testing.assert_close(layer(x, weight), layer.plainly(x, weight, None))
        other = torch.randn(*shape[:-1], 24)
        torch.testing.assert_close(layer(x, weight, bias, other), layer.plainly(x, weight, bias, other))
        gate = TransposedLinear(activation, "mul")
        torch.testing.assert_close(gate(x, weight, bias, other), gate.plainly(x, weight, bias, other))


def test_a_weight_is_transposed_once_and_anew_when_it_has_changed() -> None:
    weight, bias = tensors()
    layer = TransposedLinear()
    with torch.no_grad():
        layer(ROW, weight, bias)
        transposed = layer.transposed(weight)
        assert layer.transposed(weight) is transposed and transposed.shape == (16, 24)
        weight.mul_(2)
        torch.testing.assert_close(layer(ROW, weight, bias), layer.plainly(ROW, weight, bias))
        assert layer.transposed(weight) is not transposed


def test_gradients_other_types_and_copies_are_as_of_any_packed_layer() -> None:
    weight, bias = tensors()
    layer = TransposedLinear(GELU, "mul")
    assert pickle.loads(pickle.dumps(layer)) == copy.deepcopy(layer) == layer != PackedLinear(GELU, joins="mul")
    x = ROW.clone().requires_grad_()
    TransposedLinear()(x, weight, bias).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0, 0], weight.sum(0))
    assert TransposedLinear()(ROW.double(), weight.double(), bias.double()).dtype is torch.float64


def test_a_weight_that_lies_by_inputs_is_read_as_it_is() -> None:
    layer, weight, bias = TransposedLinear(inputs_first=True), torch.randn(6, 5), torch.randn(5)
    for x in (torch.randn(1, 1, 6), torch.randn(2, 3, 6), torch.randn(6)):
        torch.testing.assert_close(layer(x, weight, bias), x @ weight + bias)
    assert pickle.loads(pickle.dumps(layer)) == layer != TransposedLinear()

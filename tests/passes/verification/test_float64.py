"""Run for the reference, code that casts down or makes narrow tensors computes in float64 all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxopt.passes.verification import Float64Mode, double_defaults, narrow, widened

X = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(3, 4) / 3


def in_reference(function: Callable[[Tensor], Tensor], x: Tensor = X) -> tuple[Tensor, Float64Mode]:
    mode = Float64Mode()
    with double_defaults(), mode:
        return function(x), mode


CASTING = {
    "float": lambda x: x.float().exp(),
    "half": lambda x: x.half().exp(),
    "to dtype": lambda x: x.to(torch.bfloat16).exp(),
    "to tensor": lambda x: x.to(torch.zeros(1, dtype=torch.float32)).exp(),
    "type": lambda x: x.type(torch.float32).exp(),
    "softmax dtype": lambda x: F.softmax(x, -1, dtype=torch.float32) * x.exp().sum(-1, keepdim=True),
    "sum dtype": lambda x: x.exp() + x.sum(dtype=torch.float32) - x.sum(),
    "factory": lambda x: x.exp() * torch.ones(4, dtype=torch.float32),
    "default factory": lambda x: x.exp() * torch.ones(4),
    "literal": lambda x: x.exp() * torch.tensor(0.1) / 0.1,
    "narrow literal": lambda x: x.exp() + torch.tensor([0.25], dtype=torch.float16) - 0.25,
    "integer division": lambda x: x.exp() * (torch.arange(4) + 1) / 3 / ((torch.arange(4) + 1) / 3),
    "filled in place": lambda x: torch.empty_like(x, dtype=torch.float32).copy_(x).exp(),
    "index put": lambda x: torch.zeros(3, 4, dtype=torch.float32).index_put((torch.arange(3),), x).exp(),
    "autocast": lambda x: autocast(x).exp(),
}  # fmt: skip


def autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ torch.eye(4)


@pytest.mark.parametrize("name", CASTING)
def test_nothing_is_lost_on_the_way(name: str) -> None:
    result, _ = in_reference(CASTING[name])
    assert result.dtype is torch.float64
    torch.testing.assert_close(result, X.exp(), rtol=1e-14, atol=1e-14)


CAST_DOWN = ["float", "half", "to dtype", "to tensor", "type", "softmax dtype", "sum dtype", "filled in place"]


@pytest.mark.parametrize("name", CAST_DOWN)
def test_the_same_code_does_lose_without_promotion(name: str) -> None:
    """Otherwise the test above would show nothing."""
    assert not torch.allclose(CASTING[name](X).double(), X.exp(), rtol=1e-12, atol=1e-12)


def test_gradients_pass_through_casts_undiminished() -> None:
    x = X.clone().requires_grad_()
    mode = Float64Mode()
    with double_defaults(), mode:
        y = x.bfloat16().tanh().float().sum()
    (gradient,) = torch.autograd.grad(y, x)
    torch.testing.assert_close(gradient, 1 - X.tanh() ** 2, rtol=1e-14, atol=1e-14)


def test_views_of_narrow_tensors_stay_views() -> None:
    cache = torch.zeros(3, 4)

    def write(x: Tensor) -> Tensor:
        cache[0] = 1
        return x

    in_reference(write)
    assert cache[0].tolist() == [1, 1, 1, 1]


def test_integers_and_small_floats_are_left_alone() -> None:
    result, mode = in_reference(lambda x: x.to(torch.float8_e4m3fn))
    assert (result.dtype, mode.promoted) == (torch.float8_e4m3fn, False)
    result, mode = in_reference(lambda x: x.to(torch.int32))
    assert (result.dtype, mode.promoted) == (torch.int32, False)


def test_complex_numbers_are_widened_too() -> None:
    result, mode = in_reference(lambda x: x.to(torch.complex64))
    assert (result.dtype, mode.promoted) == (torch.complex128, True)


@pytest.mark.parametrize(
    ("wide", "dtype", "expected"),
    [
        (torch.float64, torch.bfloat16, torch.float64),
        (torch.float64, torch.complex64, torch.complex128),
        (torch.float64, torch.int64, torch.int64),
        (torch.float32, torch.float16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float32, torch.complex64, torch.complex64),
    ],
)
def test_types_and_what_stands_for_them(wide: torch.dtype, dtype: torch.dtype, expected: torch.dtype) -> None:
    assert widened(dtype, wide) is expected
    assert narrow(dtype, wide) is (dtype is not expected)


CENSUS = {
    "plain": (lambda x: (x @ x.T).softmax(-1).relu(), (False, False)),
    "cast": (lambda x: x.float(), (True, False)),
    "random": (lambda x: F.dropout(x, 0.5, True), (False, True)),
    "attention": (lambda x: F.scaled_dot_product_attention(*[x[None]] * 3), (False, False)),
    "attention with dropout": (lambda x: F.scaled_dot_product_attention(*[x[None]] * 3, dropout_p=0.5), (False, True)),
}


@pytest.mark.parametrize("name", CENSUS)
def test_the_mode_notes_what_the_code_is_made_of(name: str) -> None:
    function, (promoted, random) = CENSUS[name]
    _, mode = in_reference(function)
    assert (mode.promoted, mode.random) == (promoted, random)


def test_the_default_type_comes_back_when_the_code_raises() -> None:
    with pytest.raises(ZeroDivisionError), double_defaults():
        raise ZeroDivisionError
    assert torch.get_default_dtype() is torch.float32

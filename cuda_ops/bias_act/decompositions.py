"""How a bias and an activation, or an activation of several operations, are written without `bias_act` of fxopt."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, ops

from ..activations import ACTIVATIONS
from ..definition import Kernel

__all__ = ["KERNELS"]


def _biased(name: str, function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def spelling(x: Tensor, bias: Tensor, activation: str = name) -> Tensor:
        return function(x + bias)

    return spelling


def _with_residual(name: str, function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def spelling(x: Tensor, bias: Tensor, residual: Tensor, activation: str = name) -> Tensor:
        return function(x + bias) + residual

    return spelling


def _gelu_tanh(x: Tensor, activation: str = "gelu_tanh") -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _gelu_fast(x: Tensor, activation: str = "gelu_tanh") -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _gelu_erf(x: Tensor, activation: str = "gelu") -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _swish(x: Tensor, activation: str = "silu") -> Tensor:
    return x * torch.sigmoid(x)


def _bias_act(x: Tensor, activation: str, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    return ops.fxopt.bias_act.default(x, bias, residual, None, activation, 0.0)


KERNELS = (
    Kernel(
        "bias_act",
        _bias_act,
        (
            *(_with_residual(*each) for each in ACTIVATIONS.items()),
            *(_biased(*each) for each in ACTIVATIONS.items()),
            _gelu_tanh, _gelu_fast, _gelu_erf, _swish,
        ),
    ),
)  # fmt: skip

"""How gated activations are written without `swiglu` and `geglu` of fxopt."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, ops

from ..definition import Kernel

__all__ = ["KERNELS"]


def _silu(gate: Tensor, value: Tensor, activation: str = "silu") -> Tensor:
    return F.silu(gate) * value


def _sigmoid(gate: Tensor, value: Tensor, activation: str = "silu") -> Tensor:
    return gate * torch.sigmoid(gate) * value


def _gelu(gate: Tensor, value: Tensor, activation: str = "gelu") -> Tensor:
    return F.gelu(gate) * value


def _gelu_tanh(gate: Tensor, value: Tensor, activation: str = "gelu_tanh") -> Tensor:
    return F.gelu(gate, approximate="tanh") * value


def _gated(gate: Tensor, value: Tensor, activation: str) -> Tensor:
    return ops.fxopt.gated.default(gate, value, activation)


KERNELS = (Kernel("swiglu", _gated, (_silu, _sigmoid)), Kernel("geglu", _gated, (_gelu, _gelu_tanh)))

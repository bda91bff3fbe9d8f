"""The activations of fused operators, by name, and their gradients, in operations of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UsageError

__all__ = ["ACTIVATIONS", "BY_RESULT", "activated", "activated_in_place", "activation_gradient", "check_activation"]

BY_RESULT = {"relu": "relu", "sigmoid": "sigmoid_by_result", "tanh": "tanh_by_result"}
"""Activations whose gradient needs no more than their result, and what that is called in `activation_gradient`."""

_aten = cast("Any", torch.ops.aten)


def _silu_gradient(grad: Tensor, z: Tensor) -> Tensor:
    """Return the gradient of SiLU: where a gradient of it may be asked for, in operations that have one."""
    if not torch.is_grad_enabled():
        return _aten.silu_backward(grad, z)
    gate = torch.sigmoid(z)
    return grad * gate * (1 + z * (1 - gate))


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
"""Of a tensor, as a new one."""
_IN_PLACE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "silu": lambda z: F.silu(z, inplace=True),
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
}
_BACKWARD: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda grad, z: _aten.threshold_backward(grad, z, 0),
    "gelu": _aten.gelu_backward,
    "gelu_tanh": lambda grad, z: _aten.gelu_backward(grad, z, approximate="tanh"),
    "silu": _silu_gradient,
    "sigmoid": lambda grad, z: _aten.sigmoid_backward(grad, torch.sigmoid(z)),
    "tanh": lambda grad, z: _aten.tanh_backward(grad, torch.tanh(z)),
    "sigmoid_by_result": _aten.sigmoid_backward,
    "tanh_by_result": _aten.tanh_backward,
}


def check_activation(operator: str, activation: str) -> None:
    """Raise a `UsageError` where an activation is not known."""
    if activation not in ACTIVATIONS:
        raise UsageError(f"{operator}: activation is {activation!r}; pass one of {', '.join(ACTIVATIONS)}")


def activated(z: Tensor, activation: str) -> Tensor:
    """Return the activation of a tensor, as a new one."""
    return ACTIVATIONS[activation](z)


def activated_in_place(z: Tensor, activation: str) -> Tensor:
    """Return the activation of a tensor that nobody needs any more, in its memory if that can be."""
    return (_IN_PLACE.get(activation) or ACTIVATIONS[activation])(z)


def activation_gradient(grad: Tensor, z: Tensor, activation: str) -> Tensor:
    """Return the gradient of what an activation was given; of one by its result, `z` is that."""
    return _BACKWARD[activation](grad, z)

"""What gated activations and their gradient are: references, checks, results' shapes."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from ...errors import UsageError
from ..activations import activated, activation_gradient, check_activation
from ..checks import as_under_autocast, check_one_device, check_one_dtype
from ..definition import by_reference, define, keep_inputs, times

__all__ = ["geglu", "swiglu"]


_CALLED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu"}
"""Activation -> the function that has it; errors name this."""


def _reference(gate: Tensor, value: Tensor, activation: str) -> Tensor:
    return activated(gate, activation).contiguous().mul_(value)


def _plain(gate: Tensor, value: Tensor, activation: str) -> Tensor:
    return activated(gate, activation) * value


def _check(gate: Tensor, value: Tensor, activation: str) -> None:
    name = _CALLED.get(activation, "gated")
    check_one_dtype(name, gate=gate, value=value)
    check_one_device(name, gate=gate, value=value)
    check_activation(name, activation)
    if gate.shape != value.shape:
        raise UsageError(f"{name}: value has shape {tuple(value.shape)}, expected {tuple(gate.shape)}")


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_gated_backward(grad, *ctx.saved_tensors, *ctx.settings), None


def _backward_reference(grad: Tensor, gate: Tensor, value: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    of_value = times(activated(gate, activation), grad)
    return activation_gradient(grad * value, gate, activation).contiguous(), of_value.contiguous()


def _check_backward(grad: Tensor, gate: Tensor, value: Tensor, activation: str) -> None:
    check_one_dtype("gated_backward", gate=gate, value=value, grad=grad)
    check_activation("gated_backward", activation)


def _fake_backward(grad: Tensor, gate: Tensor, value: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


_gated_backward = define(
    "gated_backward",
    _backward_reference,
    check=_check_backward,
    fake=_fake_backward,
    kernel="gated.triton_kernel:gated_backward",
    **by_reference(_backward_reference),
)
_gated = define(
    "gated",
    _reference,
    check=_check,
    kernel="gated.triton_kernel:gated",
    setup=keep_inputs,
    backward=_backward,
    plain=_plain,
)


def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """Return `silu(gate) * value` (Shazeer, GLU Variants Improve Transformer, 2020).

    Both are floating-point, of one shape, dtype and device, or a UsageError is raised.
    """
    return _gated(gate, as_under_autocast(gate, value), "silu")


def geglu(gate: Tensor, value: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Return `gelu(gate) * value` (Shazeer, GLU Variants Improve Transformer, 2020).

    Both are floating-point, of one shape, dtype and device, or a UsageError is raised.
    """
    if approximate not in ("none", "tanh"):
        raise UsageError(f"geglu: approximate is {approximate!r}; pass 'none' or 'tanh'")
    return _gated(gate, as_under_autocast(gate, value), "gelu" if approximate == "none" else "gelu_tanh")

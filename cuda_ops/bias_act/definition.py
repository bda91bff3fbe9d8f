"""What `bias_act` and its gradient are: references, checks, gradients."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from ...errors import UsageError
from ..activations import BY_RESULT, activated, activated_in_place, activation_gradient, check_activation
from ..checks import as_under_autocast, check_key, check_one_device, check_one_dtype, check_vector
from ..definition import by_reference, define
from ..philox import key_of, uniform

__all__ = ["bias_act"]

_NAME = "bias_act"


def _reference(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, key: Tensor | None, activation: str, dropout: float
) -> Tensor:
    result = activated(x, activation) if bias is None else activated_in_place(x + bias, activation)
    result = result.contiguous()
    if key is not None:
        result.mul_(_kept(x, key, dropout))
    return result if residual is None else result.add_(residual)


def _plain(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, key: Tensor | None, activation: str, dropout: float
) -> Tensor:
    result = activated(x if bias is None else x + bias, activation)
    result = result if key is None else result * _kept(x, key, dropout)
    return result if residual is None else result + residual


def _kept(x: Tensor, key: Tensor, dropout: float) -> Tensor:
    """Return what dropout multiplies with: zero, or what makes up for that."""
    drawn = uniform(x.shape, key)
    return drawn.ge_(dropout).mul_(1 / (1 - dropout) if dropout < 1 else 0).to(x.device, x.dtype)


def _check(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, key: Tensor | None, activation: str, dropout: float
) -> None:
    check_one_dtype(_NAME, x=x, bias=bias, residual=residual)
    check_one_device(_NAME, x=x, bias=bias, residual=residual)
    check_vector(_NAME, x, bias=bias)
    check_activation(_NAME, activation)
    if residual is not None and residual.shape != x.shape:
        raise UsageError(f"{_NAME}: residual has shape {tuple(residual.shape)}, expected {tuple(x.shape)}")
    if not 0 <= dropout <= 1:
        raise UsageError(f"{_NAME}: dropout is {dropout}; pass a probability")
    check_key(_NAME, key)


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, residual, key, activation, dropout = inputs
    by_result = BY_RESULT.get(activation) if residual is None and key is None else None
    ctx.settings = by_result or activation, dropout
    ctx.save_for_backward(*(output, None, None) if by_result else (x, bias, key))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad
    of_x = _bias_act_backward(grad, *ctx.saved_tensors, *ctx.settings) if wanted[0] or wanted[1] else None
    of_bias = of_x.sum_to_size(of_x.shape[-1:]) if of_x is not None and wanted[1] else None
    return of_x, of_bias, grad if wanted[2] else None, None, None, None


def _backward_reference(
    grad: Tensor, x: Tensor, bias: Tensor | None, key: Tensor | None, activation: str, dropout: float
) -> Tensor:
    if key is not None:
        grad = grad * _kept(x, key, dropout)
    return activation_gradient(grad, x if bias is None else x + bias, activation).contiguous()


def _check_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, key: Tensor | None, activation: str, dropout: float
) -> None:
    check_one_dtype(f"{_NAME}_backward", x=x, grad=grad, bias=bias)
    if activation not in BY_RESULT.values():
        check_activation(f"{_NAME}_backward", activation)


_bias_act_backward = define(
    f"{_NAME}_backward",
    _backward_reference,
    check=_check_backward,
    fake=_fake,
    kernel="bias_act.triton_kernel:bias_act_backward",
    **by_reference(_backward_reference),
)
_bias_act = define(
    _NAME,
    _reference,
    check=_check,
    fake=_fake,
    kernel="bias_act.triton_kernel:bias_act",
    setup=_setup,
    backward=_backward,
    plain=_plain,
)


def bias_act(
    x: Tensor,
    bias: Tensor | None = None,
    activation: Literal["relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh"] = "relu",
    *,
    residual: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Return `dropout(activation(x + bias)) + residual`, for x [..., features] and bias [features], floating-point.

    Only `x` and `bias`, or only the result, are kept for the backward, which draws what dropout kept once more.

    Args:
        activation: by name; `gelu_tanh` is GELU by its approximation.
        residual: like `x`.
        dropout: the probability of a zero; pass 0 outside training, which draws nothing.
        seed, offset: decide what dropout draws, as in `bernoulli_sigmoid`.

    Raises:
        UsageError: an argument is not of that form.
    """
    bias = None if bias is None else as_under_autocast(x, bias)
    residual = None if residual is None else as_under_autocast(x, residual)
    key = key_of(_NAME, seed, offset, x.device) if dropout else None
    return _bias_act(x, bias, residual, key, activation, dropout)

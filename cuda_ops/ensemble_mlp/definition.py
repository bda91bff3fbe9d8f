"""What `ensemble_mlp` and its gradient are: checks, results' shapes, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from ...compat import autocast_dtype
from ...errors import UsageError
from ..activations import check_activation
from ..checks import check_one_device, check_one_dtype
from ..definition import by_reference, define
from .reference import gradients, plain_results, results

__all__ = ["ensemble_mlp"]

_NAME = "ensemble_mlp"


def _check(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str) -> None:
    if not weights:
        raise UsageError(f"{_NAME}: weights is empty; pass one for each layer")
    if len(biases) != len(weights):
        raise UsageError(f"{_NAME}: biases has {len(biases)} elements, weights {len(weights)}; pass None where none is")
    operands = {"x": x, **_named("weights", weights), **_named("biases", biases)}
    check_one_dtype(_NAME, **operands)
    check_one_device(_NAME, **operands)
    check_activation(_NAME, activation)
    _check_shapes(x, weights, biases)


def _named(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{name}[{layer}]": tensor for layer, tensor in enumerate(tensors)}


def _check_shapes(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
    members = weights[0].shape[0] if weights[0].dim() else 0
    if x.dim() not in (2, 3) or (x.dim() == 3 and x.shape[0] != members):
        expected = f"(batch, features) or ({members}, batch, features)"
        raise UsageError(f"{_NAME}: x has shape {tuple(x.shape)}, expected {expected}")
    features = x.shape[-1]
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if weight.dim() != 3 or weight.shape[0] != members or weight.shape[2] != features:
            found = f"weights[{layer}] has shape {tuple(weight.shape)}"
            raise UsageError(f"{_NAME}: {found}, expected ({members}, out, {features})")
        features = weight.shape[1]
        if bias.numel() and bias.shape != weight.shape[:2]:
            expected = f"expected ({members}, {features})"
            raise UsageError(f"{_NAME}: biases[{layer}] has shape {tuple(bias.shape)}, {expected}")


def _fake(x: Tensor, weights: list[Tensor], biases: list[Tensor], activation: str) -> Tensor:
    return x.new_empty(weights[0].shape[0], x.shape[-2], weights[-1].shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, biases, ctx.activation = inputs
    ctx.save_for_backward(x, *weights, *biases)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, *parameters = ctx.saved_tensors
    layers = len(parameters) // 2
    wants_x, *wanted = ctx.needs_input_grad[:3]
    of_x, *found = _ensemble_mlp_backward(
        grad, x, parameters[:layers], parameters[layers:], ctx.activation, wants_x
    )  # fmt: skip
    of_weights, of_biases = (
        [each if wants else None for each, wants in zip(part, wants_part, strict=True)]
        for part, wants_part in zip((found[:layers], found[layers:]), wanted, strict=True)
    )
    return of_x if wants_x else None, of_weights, of_biases, None


def _check_backward(
    grad: Tensor, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str, of_x: bool
) -> None:
    check_one_dtype(f"{_NAME}_backward", x=x, grad=grad)


def _fake_backward(
    grad: Tensor, x: Tensor, weights: list[Tensor], biases: list[Tensor], activation: str, of_x: bool
) -> list[Tensor]:
    of_parameters = [each.new_empty(each.shape) for each in (*weights, *biases)]
    return [x.new_empty(x.shape if of_x else 0), *of_parameters]


_ensemble_mlp_backward = define(
    f"{_NAME}_backward",
    gradients,
    check=_check_backward,
    fake=_fake_backward,
    kernel="ensemble_mlp.triton_kernel:ensemble_mlp_backward",
    **by_reference(gradients),
)
_ensemble_mlp = define(
    _NAME,
    results,
    check=_check,
    fake=_fake,
    kernel="ensemble_mlp.triton_kernel:ensemble_mlp",
    setup=_setup,
    backward=_backward,
    plain=plain_results,
)


def ensemble_mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    activation: Literal["relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh"] = "relu",
    *,
    own_inputs: bool = False,
) -> Tensor:
    """Return what multilayer perceptrons of one form compute, each with weights of its own: [members, ..., out].

    The activation stands between layers, not behind the last one. On a GPU one launch computes all members where the
    weights of one fit into a block's memory: up to 10,240 of them, each width counted as the next power of two, 16 at
    the least, in at most six layers; larger ones are batched products. The backward computes activations once more.

    Args:
        x: [..., in], read by every member; floating-point.
        weights: of each layer [members, out, in], `in` being `out` of the layer before.
        biases: of each layer [members, out], or None where it has none.
        activation: by name; `gelu_tanh` is GELU by its approximation.
        own_inputs: `x` is [members, ..., in], one input for each.

    Raises:
        UsageError: an argument is not of that form.
    """
    given = biases if biases is not None else [None] * len(weights)
    present = [x.new_empty(0) if bias is None else bias for bias in given]
    operand, *layers = ([each.to(autocast_dtype(each)) for each in part] for part in ([x], weights, present))
    outer = 1 if own_inputs else 0
    if x.dim() <= outer:
        expected = "(members, ..., features)" if own_inputs else "(..., features)"
        raise UsageError(f"{_NAME}: x has shape {tuple(x.shape)}, expected {expected}")
    rows = operand[0].flatten(outer, -2) if x.dim() > outer + 1 else operand[0].unsqueeze(outer)
    result = _ensemble_mlp(rows, *layers, activation)
    if x.dim() == outer + 2:
        return result
    return result.unflatten(1, x.shape[outer:-1]) if x.dim() > outer + 2 else result.squeeze(1)

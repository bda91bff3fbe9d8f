"""The members of an ensemble by batched products of torch: what `ensemble_mlp` and its gradient mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..activations import BY_RESULT, activated, activated_in_place, activation_gradient

__all__ = ["gradients", "plain_results", "results"]


def results(x: Tensor, weights: list[Tensor], biases: list[Tensor], activation: str) -> Tensor:
    """Return the last layer's result of each member, [members, batch, out]; an empty bias stands for none."""
    return _computed(x, weights, biases, lambda value: activated_in_place(value, activation)).contiguous()


def plain_results(x: Tensor, weights: list[Tensor], biases: list[Tensor], activation: str) -> Tensor:
    """Return the same, and write into nothing."""
    return _computed(x, weights, biases, lambda value: activated(value, activation))


def _computed(x: Tensor, weights: list[Tensor], biases: list[Tensor], activate: Callable[[Tensor], Tensor]) -> Tensor:
    value = _for_each(x, weights[0])
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        value = _linear(activate(value) if layer else value, weight, bias)
    return value


def gradients(
    grad: Tensor, x: Tensor, weights: list[Tensor], biases: list[Tensor], activation: str, of_x: bool
) -> list[Tensor]:
    """Return the gradients of x (empty unless `of_x` asks for it), of the weights, and of the biases."""
    inputs, kept = _hidden(x, weights, biases, activation)
    of_weights, of_biases = list[Tensor](), list[Tensor]()
    for layer in reversed(range(len(weights))):
        of_weights.append(torch.bmm(grad.mT, inputs[layer]).contiguous())
        of_biases.append(grad.sum(1) if biases[layer].numel() else torch.zeros_like(biases[layer]))
        if layer:
            of_input = torch.bmm(grad, weights[layer])
            grad = activation_gradient(of_input, kept[layer - 1], BY_RESULT.get(activation, activation))
    first = _of_x(grad, x, weights[0]) if of_x else x.new_empty(0)
    return [first, *reversed(of_weights), *reversed(of_biases)]


def _hidden(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what each layer reads, and what the gradient of each activation needs."""
    inputs, kept = [_for_each(x, weights[0])], list[Tensor]()
    for weight, bias in zip(weights[:-1], biases, strict=False):
        z = _linear(inputs[-1], weight, bias)
        inputs.append(activated(z, activation))
        kept.append(inputs[-1] if activation in BY_RESULT else z)
    return inputs, kept


def _of_x(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    if x.dim() == 3:
        return torch.bmm(grad, weight).contiguous()
    return grad.transpose(0, 1).flatten(1) @ weight.flatten(0, 1)


def _for_each(x: Tensor, weight: Tensor) -> Tensor:
    return x if x.dim() == 3 else x.expand(weight.shape[0], *x.shape)


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias[:, None], x, weight.mT) if bias.numel() else torch.bmm(x, weight.mT)

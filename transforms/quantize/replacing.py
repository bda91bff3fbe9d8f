"""Put a layer with small numbers in the place of another, and say how its state follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ...errors import MatchFailure
from ...layers.quantized import QuantizedLayer, QuantizedLinear, TiedInt8Linear
from ...passes.rewriting import Edit
from ...runtime.state import QuantizeWeight, StateStep
from .kernels import kernel_problem
from .linears import linear_of

__all__ = ["Held", "Instead", "instead_of", "instead_of_linear", "put"]

Held = Sequence[tuple[Tensor, Tensor]]
"""Numbers and scales of each weight."""


@dataclass(frozen=True)
class Instead:
    """What stands in the place of a layer.

    Attributes:
        layer: with small numbers.
        steps: how its state follows.
    """

    layer: QuantizedLayer
    steps: tuple[StateStep, ...]


def instead_of(weights: Mapping[StateStep, Tensor], make: Callable[[Held], QuantizedLayer]) -> Instead:
    """Return what stands in the place of a layer.

    Args:
        weights: what each weight becomes, as a step, and the weight.
        make: returns the new layer, from the numbers and scales of each.
    """
    held = [step.forward([weight.detach()]) for step, weight in weights.items()]
    return Instead(make([(values, scales) for values, scales in held]), tuple(weights))


def instead_of_linear(
    module: nn.Module, make: type[QuantizedLinear], form: str, group: int, *, stays: bool = False
) -> Instead:
    """Return what stands in the place of a linear layer.

    Args:
        module: the layer.
        make: the new layer's class.
        form, group: see `QuantizeWeight`.
        stays: the weight stays as it is, for others who have it too; in int8 alone.

    Raises:
        MatchFailure: the module is no linear layer, or the kernel is wrong.
    """
    linear = linear_of(module)
    if linear is None:
        raise MatchFailure("it is no linear layer any more")
    problem = kernel_problem(make, linear.outputs, linear.inputs, group)
    if problem:
        raise MatchFailure(problem)
    if stays:
        return Instead(TiedInt8Linear(linear.weight, linear.bias, group), ())
    step, dtype = QuantizeWeight.of("weight", linear.weight, form, linear.dim, group), linear.weight.dtype
    return instead_of({step: linear.weight}, lambda held: make(*held[0], linear.bias, dtype, linear.dim))


def put(edit: Edit, path: str, instead: Instead) -> None:
    """Put a layer in the place of another, at a path from the site's owner."""
    edit.replace_module(path, instead.layer)
    for step in instead.steps:
        edit.record_state(step)

"""Put a layer with small numbers in the place of another, and say how its state follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from ...errors import MatchFailure
from ...layers.quantized import QuantizedLayer, QuantizedLinear
from ...passes.rewriting import Edit
from ...passes.state import QuantizeWeight, StateStep
from .kernels import kernel_problem
from .linears import Linear, linear_of

__all__ = ["put", "replace_linear"]

Held = Sequence[tuple[Tensor, Tensor]]
"""Numbers and scales of each weight."""


def put(edit: Edit, path: str, weights: Mapping[StateStep, Tensor], make: Callable[[Held], QuantizedLayer]) -> None:
    """Put a layer in the place of another.

    Args:
        edit: of the site.
        path: of the layer, from the site's owner.
        weights: what each weight becomes, as a step, and the weight.
        make: returns the new layer, from the numbers and scales of each.
    """
    held = [step.forward([weight.detach()]) for step, weight in weights.items()]
    edit.replace_module(path, make([(values, scales) for values, scales in held]))
    for step in weights:
        edit.record_state(step)


def replace_linear(edit: Edit, make: type[QuantizedLinear], form: str, group: int) -> None:
    """Replace the site's module, a linear layer, and say how its state follows.

    Args:
        edit: of the site.
        make: the new layer's class.
        form, group: see `QuantizeWeight`.
    """
    linear = _there(edit)
    problem = kernel_problem(make, linear.outputs, linear.inputs, group)
    if problem:
        raise MatchFailure(problem)
    step = QuantizeWeight.of("weight", linear.weight, form, linear.dim, group)
    put(edit, "", {step: linear.weight}, lambda held: make(*held[0], linear.bias, linear.weight.dtype, linear.dim))


def _there(edit: Edit) -> Linear:
    linear = linear_of(edit.owner)
    if linear is None:
        raise MatchFailure("it is no linear layer any more")
    return linear

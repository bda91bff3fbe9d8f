"""Put a layer with small numbers in the place of another, and say how its state follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ...compat import own_parameters
from ...errors import MatchFailure
from ...layers.quantized import QuantizedLayer, QuantizedLinear, TiedInt8Linear
from ...passes.rewriting import Edit
from ...runtime.state import QuantizeByData, QuantizeSmoothed, QuantizeWeight, StateStep, powers_of
from .kernels import kernel_problem
from .layers import linear_of, weight_of
from .methods import Treatment, shift_of

__all__ = ["Held", "Instead", "instead_of", "instead_of_linear", "put"]

Held = Sequence[tuple[Tensor, Tensor]]
"""Numbers and scales of each weight."""


@dataclass(frozen=True)
class Instead:
    """What stands in the place of a layer, how its state follows, and what plans keep of it, and only this run."""

    layer: QuantizedLayer
    steps: tuple[StateStep, ...]
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weight: Tensor | None = None


def instead_of(weights: Mapping[StateStep, Tensor], make: Callable[[Held], QuantizedLayer]) -> Instead:
    """Return the layer that `make` makes of numbers and scales; `weights` says what each becomes, as a step."""
    held = [step.forward([weight.detach()]) for step, weight in weights.items()]
    return Instead(make([(values, scales) for values, scales in held]), tuple(weights))


def instead_of_linear(
    module: nn.Module, make: type[QuantizedLinear], form: str, group: int, found: Treatment, *, stays: bool = False
) -> Instead:
    """Return what stands in the place of a linear layer, whose weight may have to stay; or raise `MatchFailure`."""
    linear = linear_of(module)
    if linear is None:
        raise MatchFailure("it is no linear layer any more")
    reason = kernel_problem(make, *reversed(linear.channels), group)
    if reason:
        raise MatchFailure(reason)
    weight, bias, dim = weight_of(module), own_parameters(module).get("bias"), int(linear.inputs_first)
    if stays:
        return Instead(TiedInt8Linear(weight, bias, group), ())
    step = QuantizeWeight.of("weight", weight, form, dim, group)
    factors = shift = None
    if found.weight is not None:
        step = QuantizeByData(**vars(step))
    if found.exponents:
        step = QuantizeSmoothed(**vars(step), exponents=found.exponents)
        factors = powers_of(found.exponents, linear.channels[0], -1).to(weight.device)
    if found.shift:
        shift = shift_of(found.shift, linear.channels[1]).to(weight.device)
    rounded = weight if found.weight is None else found.weight.to(weight.device).movedim(0, dim)
    made = instead_of(
        {step: rounded}, lambda held: make(*held[0], bias, weight.dtype, dim, factors=factors, shift=shift)
    )
    return replace(made, data=found.data, weight=found.weight)


def put(edit: Edit, path: str, instead: Instead) -> None:
    """Put a layer in the place of another, at a path from the site's owner."""
    edit.replace_module(path, instead.layer)
    for step in instead.steps:
        edit.record_state(step)

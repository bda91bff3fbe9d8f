"""Put a layer with small numbers in the place of a linear one."""

from __future__ import annotations

from ...errors import MatchFailure
from ...layers.quantized import QuantizedLinear
from ...passes.rewriting import Edit
from ...passes.state import QuantizeWeight
from .kernels import kernel_problem
from .linears import Linear, linear_of

__all__ = ["replace_linear"]


def replace_linear(edit: Edit, make: type[QuantizedLinear], form: str, group: int) -> QuantizedLinear:
    """Replace the site's module, a linear layer, and say how its state follows.

    Args:
        edit: of the site.
        make: the new layer's class.
        form, group: see `QuantizeWeight`.
    """
    linear = _there(edit)
    step = QuantizeWeight.of("weight", linear.weight, form, linear.dim, group)
    values, scales = step.forward([linear.weight.detach()])
    module = make(values, scales, linear.bias, linear.weight.dtype, linear.dim)
    problem = kernel_problem(type(module), module.out_features, module.in_features, group)
    if problem:
        raise MatchFailure(problem)
    edit.replace_module("", module)
    edit.record_state(step)
    return module


def _there(edit: Edit) -> Linear:
    linear = linear_of(edit.owner)
    if linear is None:
        raise MatchFailure("it is no linear layer any more")
    return linear

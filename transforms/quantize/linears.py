"""Which layers are linear, however they are spelled, and which are convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ...compat import own_parameters
from ...layers.members import FusedMembers, stacked_weights
from ...runtime.values import user_class
from ...tracing.program import Program
from .eligible import Layer

__all__ = ["CONVOLUTIONS", "Linear", "linear_of", "linears"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Those that `int8_static` takes."""

_ONE_FUNCTION = "torch computes it as one function of its weights, in which no layer can be replaced"

_EXPERTS = "its experts' weights are stacked ({}), and there is no kernel for batched products of small numbers"

_NOT_LINEAR = (nn.Bilinear, *(getattr(nn, f"Conv{kind}{n}d") for kind in ("", "Transpose") for n in (1, 2, 3)))

_STACKED = "the weights of its members are stacked, and there is no kernel for batched products of small numbers"


@dataclass(frozen=True)
class Linear:
    """A linear layer.

    Attributes:
        module: the layer.
        weight: its weight.
        bias: its bias, or None.
        dim: which dimension of the weight is that of outputs.
    """

    module: nn.Module
    weight: nn.Parameter
    bias: nn.Parameter | None
    dim: int

    @property
    def inputs(self) -> int:
        return self.weight.shape[1 - self.dim]

    @property
    def outputs(self) -> int:
        return self.weight.shape[self.dim]


def linear_of(module: nn.Module) -> Linear | None:
    """Return a module as a linear layer, or None: `nn.Linear` itself, or the `Conv1D` of transformers."""
    kind = user_class(type(module))
    is_transposed = kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
    weight = own_parameters(module).get("weight")
    if (kind is not nn.Linear and not is_transposed) or weight is None or weight.ndim != 2:
        return None
    return Linear(module, weight, own_parameters(module).get("bias"), int(is_transposed))


def linears(program: Program, objection: Callable[[Linear], str], *, stays: bool = False) -> list[Layer]:
    """Return each linear layer by its first name, and what looks as if it held some.

    Args:
        program: the model.
        objection: says why the scheme cannot take a layer, or "".
        stays: the scheme takes weights that other modules have too.
    """
    found: list[Layer] = []
    for module in program.names.distinct:
        linear = linear_of(module)
        if linear is not None:
            detail = f"{linear.inputs} to {linear.outputs}"
            name = program.names.name(module)
            found.append(
                Layer(name, module, {"weight": linear.weight}, detail, objection(linear), stays and not linear.dim)
            )
        else:
            reason = _objection(module)
            found += [Layer(program.names.name(module), module, {}, objection=reason)] if reason else []
    return found


def _objection(module: nn.Module) -> str:
    """Return why linear layers that a module is made of cannot be replaced, or "" where it holds none."""
    if isinstance(module, FusedMembers):
        return _STACKED
    if isinstance(module, nn.MultiheadAttention):
        return _ONE_FUNCTION
    names = [] if isinstance(module, _NOT_LINEAR) else stacked_weights(module)
    return _EXPERTS.format(" and ".join(names)) if names else ""

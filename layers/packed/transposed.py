"""Linear layers at one row, on the weight transposed: memory is then read in the order in which it is fastest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...operators import derived
from .activations import NO_ACTIVATION, Activation
from .linear import PackedLinear
from .weights import can_be_packed

__all__ = ["TransposedLinear"]


def _laid_by_inputs(weight: Tensor) -> Tensor:
    """Lay the weight of a linear layer as [inputs, outputs]; return it as it is where that cannot be."""
    return weight.t().contiguous() if weight.ndim == 2 and can_be_packed(weight) else weight


class TransposedLinear(PackedLinear):
    """Compute a float32 linear layer on its weight as [inputs, outputs] at one row, else on the packed weight.
    Reading the weight takes all the time at one row, and the packed one is read at two thirds of the speed.
    With `inputs_first` the weight is [inputs, outputs] already.
    """

    def __init__(self, activation: Activation = NO_ACTIVATION, joins: str = "add", inputs_first: bool = False) -> None:
        super().__init__(activation, inputs_first=inputs_first, joins=joins)
        self.transposed = derived(_laid_by_inputs, 1)

    def narrowed(self, *, takes: bool = False, gives: bool = False) -> PackedLinear:
        """Return it as it is, in float32."""
        return self

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, other: Tensor | None = None) -> Tensor:
        """Return activation(x @ weight.T + bias + other), or with `* other`; [..., outputs]. See `PackedLinear`."""
        shape = weight.shape
        is_row = len(shape) == 2 and x.dim() and x.shape[-1] == shape[self._inputs] == x.numel()
        if not is_row or not self.takes(x, weight, bias, other, shape[self._outputs]):
            return super().__call__(x, weight, bias, other)
        if self.inputs_first and not can_be_packed(weight):
            return self.plainly(x, weight, bias, other)
        transposed = weight if self.inputs_first else self.transposed(weight)
        if transposed is weight and not self.inputs_first:  # it cannot be kept in another order
            return self.plainly(x, weight, bias, other)
        row = x.reshape(1, x.numel())
        result = torch.mm(row, transposed) if bias is None else torch.addmm(bias, row, transposed)
        result = result.view(*x.shape[:-1], shape[self._outputs])
        if other is None:
            return self.activate_in_place(result)
        return self._multiplied(result, other) if self.joins == "mul" else self.finished(result, self._gives, other)

    def plainly(self, x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None = None) -> Tensor:
        """Compute everything as torch does."""
        if torch.is_grad_enabled() and weight.requires_grad and not torch.compiler.is_dynamo_compiling():
            self.transposed.forget(id(weight))
        return super().plainly(x, weight, bias, other)

    def forget_all(self) -> None:
        """Let the packed and transposed weights be made anew."""
        super().forget_all()
        self.transposed.forget_all()

    def __reduce__(self) -> tuple[Any, ...]:
        return TransposedLinear, (self.activation, self.joins, self.inputs_first)

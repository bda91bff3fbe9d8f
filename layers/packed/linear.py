"""Linear layers on packed weights, with the activation behind them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.packed import is_packed, linear_packed, linear_product
from ...operators import derived
from .activations import NO_ACTIVATION, Activation
from .weights import NOTHING, Packed, can_be_packed

__all__ = ["PackedLinear", "TransposedLinear"]


@dataclass(frozen=True)
class _PackLinear:
    """Pack the weight of a linear layer; return it as it is where that cannot be."""

    dtype: torch.dtype
    inputs_first: bool

    def __call__(self, weight: Tensor) -> Tensor:
        if not can_be_packed(weight) or weight.ndim != 2:
            return weight
        return linear_packed((weight.t() if self.inputs_first else weight).to(self.dtype).contiguous())


class PackedLinear(Packed):
    """Compute a linear layer, and the activation behind it, on a packed weight; or as torch does. With `inputs_first`
    the weight is [inputs, outputs]; `joins` is `add` or `mul`; it may take, or give, its `dtype` beside float32.
    """

    __name__ = "packed_linear"

    def __init__(
        self, activation: Activation = NO_ACTIVATION, dtype: torch.dtype = torch.float32, inputs_first: bool = False,
        joins: str = "add", takes_narrow: bool = False, gives_narrow: bool = False,
    ) -> None:  # fmt: skip
        settings = activation, dtype, inputs_first, joins, takes_narrow, gives_narrow
        super().__init__(settings, _PackLinear(dtype, inputs_first), activation)
        self.dtype, self.inputs_first, self.joins = dtype, inputs_first, joins
        self.takes_narrow, self.gives_narrow = takes_narrow, gives_narrow
        self._inputs, self._outputs = (0, 1) if inputs_first else (1, 0)
        self._dtypes = (torch.float32, dtype) if takes_narrow else (torch.float32,)
        self._gives = dtype if gives_narrow else torch.float32

    def narrowed(self, *, takes: bool = False, gives: bool = False) -> PackedLinear:
        """Return the same, which besides takes or gives tensors of its `dtype`."""
        takes, gives = takes or self.takes_narrow, gives or self.gives_narrow
        return PackedLinear(self.activation, self.dtype, self.inputs_first, self.joins, takes, gives)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, other: Tensor | None = None) -> Tensor:
        """Return activation(x @ weight.T + bias + other), or with `* other`; [..., outputs] for x [..., inputs]."""
        shape = weight.shape
        if len(shape) != 2 or not x.dim() or x.shape[-1] != shape[self._inputs]:
            return self.plainly(x, weight, bias, other)
        if not self.takes(x, weight, bias, other, shape[self._outputs], self._dtypes):
            return self.plainly(x, weight, bias, other)
        packed = self.weights(weight)
        if not is_packed(packed):
            return self.plainly(x, weight, bias, other)
        post_op = self.post_op if other is None else NOTHING
        result = linear_product(x if x.dtype is self.dtype else x.to(self.dtype), packed, bias, post_op)
        if other is not None and self.joins == "mul":
            return self._multiplied(result, other)
        return self.finished(result, self._gives, other)

    def _multiplied(self, result: Tensor, other: Tensor) -> Tensor:
        result = result if result.dtype is other.dtype else result.to(torch.float32)
        if other.shape != result.shape or other.dtype is not result.dtype:
            return self.activation(result * other).to(self._gives)
        return self.activate_in_place(result.mul_(other)).to(self._gives)

    def joined(self, result: Tensor, other: Tensor) -> Tensor:
        """Return the layer's result with what is added to it, or what it is multiplied by."""
        return result * other if self.joins == "mul" else result + other

    def plainly(self, x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None = None) -> Tensor:
        """Compute everything as torch does."""
        if self.takes_narrow and weight.dtype is torch.float32:  # the layer before was computed packed
            x, other = self._widened(x), None if other is None else self._widened(other)
        return super().plainly(x, weight, bias, other)

    def _widened(self, x: Tensor) -> Tensor:
        return x.to(torch.float32) if x.dtype is self.dtype else x

    def computed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the layer as torch does."""
        return F.linear(x, weight.t() if self.inputs_first else weight, bias)


def _laid_by_inputs(weight: Tensor) -> Tensor:
    """Lay the weight of a linear layer as [inputs, outputs]; return it as it is where that cannot be."""
    return weight.t().contiguous() if weight.ndim == 2 and can_be_packed(weight) else weight


class TransposedLinear(PackedLinear):
    """Compute a float32 linear layer at one row on the weight transposed, which streams, else packed."""

    def __init__(self, activation: Activation = NO_ACTIVATION, joins: str = "add", inputs_first: bool = False) -> None:
        super().__init__(activation, inputs_first=inputs_first, joins=joins)
        self.settings = activation, joins, inputs_first
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

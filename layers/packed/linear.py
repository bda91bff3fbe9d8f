"""Linear layers on packed weights, with the activation behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat_packed import is_packed, linear_packed, linear_product
from .activations import NO_ACTIVATION, Activation
from .weights import NOTHING, Packed, can_be_packed

__all__ = ["PackedLinear"]


@dataclass(frozen=True)
class _Weight:
    """Pack the weight of a linear layer; return it as it is where that cannot be.

    Attributes:
        dtype: to pack it in.
        transposed: it is [inputs, outputs].
    """

    dtype: torch.dtype
    transposed: bool

    def __call__(self, weight: Tensor) -> Tensor:
        if not can_be_packed(weight) or weight.ndim != 2:
            return weight
        return linear_packed((weight.t() if self.transposed else weight).to(self.dtype).contiguous())


class PackedLinear(Packed):
    """Compute a linear layer, and the activation behind it, on a packed weight; or as torch does where that cannot be.

    Args:
        activation: behind the layer.
        dtype: in which it is computed; input and output are float32.
        transposed: the weight is [inputs, outputs].
    """

    __name__ = "packed_linear"

    def __init__(
        self, activation: Activation = NO_ACTIVATION, dtype: torch.dtype = torch.float32, transposed: bool = False
    ) -> None:
        super().__init__((activation, dtype, transposed), _Weight(dtype, transposed), activation)
        self.dtype, self.transposed = dtype, transposed
        self._inputs, self._outputs = (0, 1) if transposed else (1, 0)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, other: Tensor | None = None) -> Tensor:
        """Return activation(x @ weight.T + bias + other), [..., outputs].

        Args:
            x: [..., inputs].
            weight: [outputs, inputs].
            bias: [outputs] or None.
            other: of the shape of the result, or None.
        """
        shape = weight.shape
        if len(shape) != 2 or not x.dim() or x.shape[-1] != shape[self._inputs]:
            return self.plainly(x, weight, bias, other)
        if not self.takes(x, weight, bias, other, shape[self._outputs]):
            return self.plainly(x, weight, bias, other)
        packed = self.weights(weight)
        if not is_packed(packed):
            return self.plainly(x, weight, bias, other)
        behind = self.behind if other is None else NOTHING
        result = linear_product(x if x.dtype is self.dtype else x.to(self.dtype), packed, bias, behind)
        return self.finished(result, x.dtype, other)

    def computed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the layer as torch does."""
        return F.linear(x, weight.t() if self.transposed else weight, bias)

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedLinear, self.settings

"""A linear layer whose weight others compute with too: the weight stays, and 8 bits are made of it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ...compat import autocast_dtype, is_plainly_eager, wants_gradients
from ...compat.quantized import int8_packed, int8_product_dynamic, runs_simulation
from ...runtime.state import quantized
from .layer import QuantizedLayer, is_finite

__all__ = ["TiedInt8Linear"]


class TiedInt8Linear(QuantizedLayer):
    """Quantize activations at each call, and multiply integers of 8 bits that are made of a weight which stays.

    They are made anew where it was changed, and are in no state dict. Calls that want gradients, compilers and
    exporters get the linear layer.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: int) -> None:
        super().__init__()
        self.weight, self.group = weight, group
        self.register_parameter("bias", bias)
        self.out_features, self.in_features = weight.shape

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as nn.Linear calls it
        weight, bias = self.weight, self.bias
        if wants_gradients(input, weight, bias):
            self.packing.forget()  # an optimizer may step on the weight next
            return F.linear(input, weight, bias)
        if runs_simulation() or not (input.is_cpu and weight.is_cpu) or not input.numel() or not is_plainly_eager():
            return F.linear(input, weight, bias)
        dtype = autocast_dtype(input)
        wide = input.to(dtype).float()
        if not is_finite(wide):
            return F.linear(input, weight, bias)
        return int8_product_dynamic(wide, self.packing.of(self._packed, weight, bias)).to(dtype)

    def _packed(self, weight: Tensor, bias: Tensor | None) -> object:
        return int8_packed(*quantized(weight.detach(), "int8", self.group), bias)

    def extra_repr(self) -> str:
        """Return what `repr` shows."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

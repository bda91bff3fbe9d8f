"""Linear layers whose weights are small numbers; each kind computes with a kernel of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...compat import autocast_dtype, is_plainly_eager, own_buffers, wants_gradients
from ...compat.quantized import (
    float8_product,
    has_float8,
    int4_packed,
    int4_product,
    int8_product_by_rows,
    int8_product_of_weights,
    int8_rows_packed,
    int8_weight_packed,
    runs_simulation,
)
from ...runtime.state import dequantized, quantized
from .activations import in_float8, quantized_by_rows, steps_of_rows
from .layer import HoldsWeight, QuantizedLayer, is_finite, is_plain_call

__all__ = [
    "Float8Linear", "Int4WeightLinear", "Int8DynamicLinear", "Int8WeightLinear", "QuantizedLinear", "TiedInt8Linear",
]  # fmt: skip

_BLOCK = 16
"""Kernels for float8 take inputs and outputs in blocks of so many."""


class QuantizedLinear(HoldsWeight):
    """Compute `x @ weight.T + bias` with the numbers and scales of a weight. Compilers and exporters get plain
    operators; under transforms, outside the CPU and for gradients it is a layer with the weight they stand for.
    What calibration found may be beside: `factors` [inputs] of the input, and `shift` [outputs] of the bias.
    """

    def __init__(
        self,
        values: Tensor,
        scales: Tensor,
        bias: nn.Parameter | None,
        dtype: torch.dtype,
        dim: int = 0,
        *,
        factors: Tensor | None = None,
        shift: Tensor | None = None,
    ) -> None:
        super().__init__(values, scales, bias, dtype, dim)
        self.out_features = values.shape[0]
        self.in_features = values.shape[1] * (2 if self.form == "int4" else 1)
        self.register_buffer("factors", factors, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as nn.Linear calls it
        factors = own_buffers(self).get("factors")
        if factors is not None:
            input = input * factors.to(input.dtype)  # noqa: A001
        if is_plain_call(input, self.bias):
            return self.kernel(input)
        if runs_simulation():
            return self.simulated(input)
        if not self.has_kernel(input.device) or not input.numel() or not is_plainly_eager():
            return self.in_floats(input)
        input = input.to(autocast_dtype(input))  # noqa: A001
        if wants_gradients(input, self.bias):
            return self.with_gradient(input)
        return self.kernel(input)

    def has_kernel(self, device: torch.device) -> bool:
        """Say whether there is a kernel for a device."""
        return device.type == "cpu"

    def kernel(self, input: Tensor) -> Tensor:  # noqa: A002
        """Compute with the kernel; gradients end here."""
        raise NotImplementedError

    def with_gradient(self, input: Tensor) -> Tensor:  # noqa: A002
        """Compute with the kernel, with gradients for the input and the bias."""
        function: Any = _LinearWithGradient
        return function.apply(self, input, self.bias)

    def simulated(self, input: Tensor) -> Tensor:  # noqa: A002
        """Compute what the kernel computes, with plain operators that round as it does."""
        return self.in_floats(input)

    def in_floats(self, input: Tensor) -> Tensor:  # noqa: A002
        """Compute with the weight that the numbers stand for."""
        bias = self.shifted_bias()
        return F.linear(input, self.wide_weight().to(input.dtype), None if bias is None else bias.to(input.dtype))

    def shifted_bias(self) -> Tensor | None:
        """Return the bias that the layer computes with; gradients flow to its own."""
        return _sum(self.bias, own_buffers(self).get("shift"))

    def kept_bias(self) -> Tensor | None:
        """Return the same for kernels, made once."""
        shift = own_buffers(self).get("shift")
        return self.bias if shift is None else self.packing.of(_sum, self.bias, shift, key="bias")

    extra_repr = cast("Any", nn.Linear).extra_repr


def _sum(bias: Tensor | None, shift: Tensor | None) -> Tensor | None:
    return bias if shift is None else shift if bias is None else bias + shift.to(bias.dtype)


class Int8DynamicLinear(QuantizedLinear):
    """Quantize activations at each call, with one scale for each row, and multiply integers of 8 bits.
    So a row gives the same whatever is beside it in a batch.
    """

    def kernel(self, input: Tensor) -> Tensor:  # noqa: A002
        """Compute in int8; the result has the input's type."""
        return _product_of_rows(input, self.packing.of(int8_rows_packed, *self.held), self.kept_bias(), self.in_floats)

    def simulated(self, input: Tensor) -> Tensor:  # noqa: A002
        """Compute with rounded activations."""
        return self.in_floats(quantized_by_rows(input))


def _product_of_rows(x: Tensor, packed: Any, bias: Tensor | None, in_floats: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what a linear layer gives, in int8 and in the type of its input; `in_floats` computes rows with NaN."""
    rows = x.reshape(-1, x.shape[-1]).float()
    scales = steps_of_rows(rows)
    odd = None if is_finite(scales) else ~scales.isfinite()
    if odd is not None:
        rows, scales = rows.masked_fill(odd, 0.0), scales.masked_fill(odd, 1.0)
    result = int8_product_by_rows(rows, scales, packed, None if bias is None else bias.float()).to(x.dtype)
    if odd is not None:
        which = odd.squeeze(-1)
        result[which] = in_floats(x.reshape(rows.shape)[which])
    return result.view(*x.shape[:-1], result.shape[-1])


class _WithNarrowActivations(QuantizedLinear):
    """Compute with activations in bfloat16, in which the kernels for small weights are fast."""

    def kernel(self, input: Tensor) -> Tensor:  # noqa: A002
        """Compute in bfloat16, adding up in float32; the result has the input's type."""
        rows = input.reshape(-1, self.in_features).bfloat16()
        result = self.product(rows).to(input.dtype).view(*input.shape[:-1], self.out_features)
        bias = self.kept_bias()
        return result if bias is None else result.add_(bias)

    def simulated(self, input: Tensor) -> Tensor:  # noqa: A002
        """Compute with activations and results in bfloat16, and sums in float32."""
        values, scales = self.held
        weight = dequantized(values, scales.bfloat16(), self.form, torch.float32)
        result = F.linear(input.bfloat16().float(), weight).bfloat16().to(input.dtype)
        bias = self.shifted_bias()
        return result if bias is None else result + bias.to(input.dtype)

    def product(self, rows: Tensor) -> Tensor:
        """Return [rows, outputs] for activations, [rows, inputs], in bfloat16."""
        raise NotImplementedError


class Int8WeightLinear(_WithNarrowActivations):
    """Multiply activations in bfloat16 with a weight of integers of 8 bits."""

    def product(self, rows: Tensor) -> Tensor:
        """Return the product."""
        return int8_product_of_weights(rows, self.packing.of(int8_weight_packed, *self.held))


class Int4WeightLinear(_WithNarrowActivations):
    """Multiply activations in bfloat16 with a weight of integers of 4 bits, in groups with a scale each."""

    form: ClassVar[str] = "int4"

    def product(self, rows: Tensor) -> Tensor:
        """Return the product."""
        values, scales = self.held
        packed = self.packing.of(_packed_halves, values, scales)
        return int4_product(rows, packed, self.in_features // scales.shape[1])


class Float8Linear(QuantizedLinear):
    """Hold the weight in float8; multiply float8 rows, one scale each, where a GPU can, else in floats."""

    form: ClassVar[str] = "float8"

    def multiplies(self, device: torch.device) -> bool:
        """Say whether a device multiplies float8, and takes these sizes."""
        return has_float8(device) and not (self.in_features % _BLOCK or self.out_features % _BLOCK)

    def has_kernel(self, device: torch.device) -> bool:
        """Say whether there is a kernel for a device."""
        return super().has_kernel(device) or self.multiplies(device)

    def kernel(self, input: Tensor) -> Tensor:  # noqa: A002
        """Compute in float8 where that can be, or with the wide weight."""
        return self.product(input) if self.multiplies(input.device) else self.in_floats(input)

    def product(self, input: Tensor) -> Tensor:  # noqa: A002
        """Compute in float8, adding up in float32; the result has the input's type."""
        values, scales = self.held
        rows, of_rows = in_float8(input.reshape(-1, self.in_features))
        weight = values.view(torch.float8_e4m3fn)
        found = float8_product(rows, of_rows, weight, scales.expand(self.out_features).contiguous())
        result = found.to(input.dtype).view(*input.shape[:-1], self.out_features)
        bias = self.kept_bias()
        return result if bias is None else result.add_(bias)

    def simulated(self, input: Tensor) -> Tensor:  # noqa: A002
        """Compute with activations rounded as the kernel does, where it multiplies float8."""
        if not self.multiplies(input.device):
            return self.in_floats(input)
        numbers, scales = in_float8(input)
        rounded = (numbers.float() * scales).to(input.dtype)
        return self.in_floats(input + (rounded - input).detach())


def _packed_halves(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return int4_packed(torch.stack([values & 15, values >> 4], -1).view(len(values), -1).int() - 8, scales)


class _LinearWithGradient(torch.autograd.Function):
    """Compute with a kernel; send gradients through the weight that its numbers stand for."""

    @staticmethod
    def forward(ctx: Any, layer: QuantizedLinear, input: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
        ctx.layer, ctx.kind = layer, None if bias is None else bias.dtype
        return layer.kernel(input).data  # no view of what is in here: it may be written to

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.layer.packing.forget_all()  # an optimizer may step on the bias now
        of_input = gradient @ ctx.layer.wide_weight().to(gradient.dtype) if ctx.needs_input_grad[1] else None
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.kind) if ctx.needs_input_grad[2] else None
        return None, of_input, of_bias


class TiedInt8Linear(QuantizedLayer):
    """Quantize activations at each call, and multiply integers of 8 bits that are made of a weight which stays, anew
    where it was changed. Calls that want gradients, compilers and exporters get the linear layer.
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
        return self.product(input.to(autocast_dtype(input)))

    def product(self, x: Tensor) -> Tensor:
        """Compute with the kernel; the result has the type of the input."""
        packed = self.packing.of(self._packed, self.weight)
        return _product_of_rows(x, packed, self.bias, self._in_floats)

    def _in_floats(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight, self.bias)

    def _packed(self, weight: Tensor) -> object:
        return int8_rows_packed(*quantized(weight.detach(), "int8", self.group))

    extra_repr = cast("Any", nn.Linear).extra_repr

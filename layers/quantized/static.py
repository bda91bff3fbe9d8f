"""Linears and convolutions of which the numbers of the input are made by a range that is known before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...compat import autocast_dtype, is_plainly_eager, wants_gradients
from ...compat.packed import Geometry
from ...compat.quantized import (
    Int8Result,
    exports_pattern,
    int8_convolution,
    int8_convolution_packed,
    int8_product_static,
    int8_static_packed,
    runs_simulation,
    weight_by_pattern,
)
from ...errors import UsageError
from .activations import Range, from_numbers, to_numbers
from .layer import HoldsWeight

__all__ = ["StaticConv", "StaticLayer", "StaticLinear"]

_PACKED = frozenset({"dilation", "geometry", "groups", "padding", "padding_mode", "range", "stride"})
"""What a packed convolution is made for."""

_OF_KERNELS = (torch.uint8, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class IntegerEpilogue:
    """What a layer computes of its result, too: "relu" or "none", then numbers of `output`; None returns floats.
    Floats are laid out as torch.nn does if `contiguous`; None: if the input is.
    """

    activation: str = "none"
    output: Range | None = None
    contiguous: bool | None = None


class StaticLayer(HoldsWeight):
    """Compute a layer with numbers of 8 bits on both sides. Compilers, exporters, transforms, other types, devices but
    the CPU, and gradients get the layer that the numbers stand for.
    """

    def __init__(
        self, values: Tensor, scales: Tensor, bias: nn.Parameter | None, dtype: torch.dtype, of_input: Range
    ) -> None:
        super().__init__(values, scales, bias, dtype)
        self.range = of_input

    def forward(
        self,
        input: Tensor,  # noqa: A002  as torch.nn calls it
        scales: Tensor | None = None,
        bias: Tensor | None = None,
        activation: str = "none",
        output: tuple[float, int] | None = None,
        contiguous: bool | None = None,
    ) -> Tensor:
        """Compute the layer with an `IntegerEpilogue`. The input is floats, or uint8 by the layer's own range; `scales`
        and `bias` have a norm folded in; `output` is scale and zero point of the numbers to return.
        """
        epilogue = IntegerEpilogue(activation, None if output is None else Range(*output), contiguous)
        scales, bias = self.held[1] if scales is None else scales, self.bias if bias is None else bias
        if not self._has_kernel(input):
            return self.simulated(input, scales, bias, epilogue)
        if wants_gradients(input, scales, bias):
            # What gradients flow through is in floats between layers, too.
            floats = IntegerEpilogue(activation, None, contiguous)
            return cast("Any", _StaticWithGradient).apply(self, floats, input, scales, bias)
        return self.kernel(input, scales, bias, epilogue)

    def _has_kernel(self, input: Tensor) -> bool:  # noqa: A002
        if runs_simulation() or not is_plainly_eager() or not input.is_cpu or not input.numel():
            return False
        return input.dtype in _OF_KERNELS and type(input) in (Tensor, nn.Parameter)

    def kernel(self, input: Tensor, scales: Tensor, bias: Tensor | None, epilogue: IntegerEpilogue) -> Tensor:  # noqa: A002
        """Compute with the kernel; gradients end here."""
        floats = self.dtype if input.dtype is torch.uint8 else input.dtype
        numbers, output = input, epilogue.output
        if input.dtype is not torch.uint8:
            numbers = to_numbers(input.detach(), self.range.scale, self.range.zero_point)
        form: Int8Result = (1.0, 0, floats, epilogue.activation)
        if output is not None:
            form = (output.scale, output.zero_point, torch.uint8, epilogue.activation)
        result = self.product(numbers, scales, bias, form)
        if output is None:
            result = result.to(floats)
            result = result.to(autocast_dtype(result))
        contiguous = input.is_contiguous() if epilogue.contiguous is None else epilogue.contiguous
        return result.contiguous() if contiguous and output is None else result

    def simulated(self, input: Tensor, scales: Tensor, bias: Tensor | None, epilogue: IntegerEpilogue) -> Tensor:  # noqa: A002
        """Compute what the kernel stands for in floating point."""
        is_float = input.dtype is not torch.uint8
        x = self.range.rounded(input) if is_float else from_numbers(input, self.range, self.dtype)
        weight = self._wide(scales, x)
        result = self.in_floats(x, weight, None if bias is None else bias.to(x.dtype))
        result = F.relu(result) if epilogue.activation == "relu" else result
        return (
            result if epilogue.output is None else to_numbers(result, epilogue.output.scale, epilogue.output.zero_point)
        )

    def _wide(self, scales: Tensor, like: Tensor) -> Tensor:
        values = self.held[0]
        if exports_pattern(like):
            return weight_by_pattern(values, scales)
        return values.to(like.dtype) * scales.to(like.dtype).reshape(-1, *[1] * (values.ndim - 1))

    def extra_repr(self) -> str:
        """Return what `repr` shows."""
        return f"weight={list(self.held[0].shape)}, bias={self.bias is not None}, scale={self.range.scale:.3g}"

    def product(self, numbers: Tensor, scales: Tensor, bias: Tensor | None, result: Int8Result) -> Tensor:
        """Compute with the kernel."""
        raise NotImplementedError

    def in_floats(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the layer as torch.nn does."""
        raise NotImplementedError


class StaticLinear(StaticLayer):
    """Compute a linear layer; see `StaticLayer`."""

    def __init__(
        self, values: Tensor, scales: Tensor, bias: nn.Parameter | None, dtype: torch.dtype, of_input: Range
    ) -> None:
        super().__init__(values, scales, bias, dtype, of_input)
        self.out_features, self.in_features = values.shape

    def product(self, numbers: Tensor, scales: Tensor, bias: Tensor | None, result: Int8Result) -> Tensor:
        """Compute with the kernel."""
        packed = self.packing.of(int8_static_packed, self.held[0], scales, bias)
        return int8_product_static(numbers.contiguous(), self.range.scale, self.range.zero_point, packed, result)

    def in_floats(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the layer as torch.nn does."""
        return F.linear(x, weight, bias)


class StaticConv(StaticLayer):
    """Compute a convolution along one, two or three dimensions; see `StaticLayer`."""

    def __init__(
        self, values: Tensor, scales: Tensor, bias: nn.Parameter | None, dtype: torch.dtype, of_input: Range,
        geometry: Geometry,
    ) -> None:  # fmt: skip
        super().__init__(values, scales, bias, dtype, of_input)
        self.geometry = geometry
        self.out_channels, self.in_channels = values.shape[0], values.shape[1] * geometry.groups
        self.kernel_size, self.groups = tuple(values.shape[2:]), geometry.groups
        self.stride, self.padding, self.dilation = geometry.stride, geometry.padding, geometry.dilation
        self.padding_mode = "zeros"

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PACKED and vars(self).get(name, value) != value:
            raise UsageError(
                f"a quantized convolution is packed for its {name}; change it in the model before it is quantized, or "
                "in fxopt.restore(model)"
            )
        super().__setattr__(name, value)

    def product(self, numbers: Tensor, scales: Tensor, bias: Tensor | None, result: Int8Result) -> Tensor:
        """Compute with the kernel."""
        settings, (scale, zero_point) = self.geometry.lists, (self.range.scale, self.range.zero_point)
        packed = self.packing.of(self._packed, self.held[0], scales, bias)
        rows = numbers if numbers.ndim == self.held[0].ndim else numbers.unsqueeze(0)
        if rows.ndim == 4:
            rows = rows.contiguous(memory_format=torch.channels_last)  # kernels are slow in making it so themselves
        found = int8_convolution(rows, scale, zero_point, packed, settings, result)
        return found if numbers.ndim == found.ndim else found.squeeze(0)

    def _packed(self, values: Tensor, scales: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
        settings, (scale, zero_point) = self.geometry.lists, (self.range.scale, self.range.zero_point)
        return int8_convolution_packed(values, scales, bias, scale, zero_point, settings)

    def in_floats(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the layer as torch.nn does."""
        function: Any = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel_size) - 1]
        stride, padding, dilation, groups = self.geometry.lists
        return function(x, weight, bias, stride, padding, dilation, groups)


class _StaticWithGradient(torch.autograd.Function):
    """Compute with a kernel; send gradients through what it stands for."""

    @staticmethod
    def forward(
        ctx: Any, layer: StaticLayer, epilogue: IntegerEpilogue, x: Tensor, scales: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.layer, ctx.epilogue = layer, epilogue
        ctx.save_for_backward(x, scales, bias)
        return layer.kernel(x, scales, bias, epilogue).data  # no view of what is in here: it may be written to

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Send gradients through `simulated`; where gradients of these are wanted, they flow on to what came in."""
        ctx.layer.packing.forget()  # an optimizer may step on the bias now
        wanted: tuple[bool, ...] = ctx.needs_input_grad[2:]
        given: list[Tensor | None] = list(ctx.saved_tensors)
        is_differentiated = torch.is_grad_enabled()
        if not is_differentiated:
            pairs = zip(given, wanted, strict=True)
            given = [tensor if tensor is None else tensor.detach().requires_grad_(want) for tensor, want in pairs]
        with torch.enable_grad():
            result = ctx.layer.simulated(*given, ctx.epilogue)
        leaves = [tensor for tensor, want in zip(given, wanted, strict=True) if tensor is not None and want]
        found = iter(
            torch.autograd.grad([result], leaves, [gradients[0].to(result.dtype)], create_graph=is_differentiated)
        )
        return None, None, *(next(found) if want else None for want in wanted)

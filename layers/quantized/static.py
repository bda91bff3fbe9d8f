"""Linears and convolutions of which the numbers of the input are made by a range that is known before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...compat import autocast_dtype, is_plainly_eager, own_buffers, wants_gradients
from ...compat.packed import Geometry
from ...compat.quantized import (
    Int8Result,
    exports_pattern,
    int8_convolution,
    int8_convolution_packed,
    int8_packed,
    int8_product_of_few_rows,
    int8_product_static,
    int8_static_packed,
    int8_takes_few_rows,
    runs_simulation,
    static_format,
    weight_by_pattern,
    why_overflow,
    writes_fake_quantization,
)
from ...errors import GuardWarning, UsageError
from ...operators import Cache
from ...runtime.state import quantized
from ..packed import BySettings
from .activations import Range, from_numbers, to_numbers
from .layer import HoldsWeight
from .linear import TiedInt8Linear

__all__ = ["StaticComputation", "StaticConv", "StaticLayer", "StaticLinear", "TiedStaticLinear"]

_PACKED = frozenset({"dilation", "geometry", "groups", "padding", "padding_mode", "range", "stride"})
"""What a packed convolution is made for."""

_LEAST = 1e-12
"""A step between the numbers of a weight; a norm may multiply an output by zero."""

_SHAPES = 4
"""For so many shapes of its input a convolution keeps its weight packed: as much memory as in floats."""

_FLOATS = "a layer of 8 bits computes in floats, since {}; quantize the model on this CPU to use its kernels"

_OF_KERNELS = (torch.uint8, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class CallForm:
    """What a layer computes of its result, too: "relu" or "none", then numbers of `output`; None returns floats.
    Floats are laid out as torch.nn does if `contiguous`; None: if the input is. `is_rounded`: floats of the input are.
    `factors` [inputs] scale floats of the input; numbers are scaled already. `shift` [outputs] is added to the sums of
    products, in steps of the weight's scales: so a norm that is folded into the scales scales it, too.
    """

    activation: str = "none"
    output: Range | None = None
    contiguous: bool | None = None
    is_rounded: bool = False
    factors: Tensor | None = None
    shift: Tensor | None = None


class _Held(NamedTuple):
    """The weight of a layer, numbers and scales, its bias, what scales the result for the layer behind, and a shift."""

    values: Tensor
    scales: Tensor
    bias: Tensor | None
    factors: Tensor | None = None
    shift: Tensor | None = None

    def shifted_bias(self) -> Tensor | None:
        """Return the bias with the shift in it."""
        if self.shift is None:
            return self.bias
        shift = self.shift * self.scales
        return shift if self.bias is None else self.bias + shift.to(self.bias.dtype)

    def wide(self, like: Tensor) -> Tensor:
        """Return the weight in floats that it stands for, in the operators that those know who trace."""
        if exports_pattern(like) and not writes_fake_quantization():
            return weight_by_pattern(self.values, self.scales)
        scales = self.scales.to(like.dtype).reshape(-1, *[1] * (self.values.ndim - 1))
        weight = self.values.to(like.dtype) * scales
        return _fake_quantized(weight, self.scales) if writes_fake_quantization() else weight


class StaticComputation(BySettings):
    """Compute a layer with numbers of 8 bits on both sides, on tensors that it is given; layers and graphs call it.
    Compilers, exporters, transforms, other types, devices but the CPU, and gradients get what the numbers stand for.
    """

    operator = "static_int8"
    __name__ = "static_int8"

    def __init__(self, of_input: Range, dtype: torch.dtype, geometry: Geometry | None = None) -> None:
        self.settings = (of_input, dtype) if geometry is None else (of_input, dtype, geometry)
        self.range, self.dtype, self.packing, self.sums = of_input, dtype, Cache(), Cache()

    def __call__(
        self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, activation: str = "none",
        output: tuple[float, int] | None = None, contiguous: bool | None = None, *, is_rounded: bool = False,
        factors: Tensor | None = None, output_factors: Tensor | None = None, shift: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute the layer with a `CallForm`. The input is floats, or uint8 by the layer's own range; `output`
        is scale and zero point of the numbers to return, those of the result times `output_factors` [outputs].
        """
        held = _Held(values, scales, bias, None if output is None else output_factors, shift)
        form = CallForm(activation, None if output is None else Range(*output), contiguous, is_rounded, factors, shift)
        if not _has_kernel(x) or not self._sums_exactly(values):
            return self.simulated(x, held, form)
        if wants_gradients(x, scales, bias):
            # What gradients flow through is in floats between layers, too.
            floats = replace(form, output=None)
            return cast("Any", _StaticWithGradient).apply(self, floats, x, values, scales, bias)
        return self.kernel(x, held, form)

    def _sums_exactly(self, values: Tensor) -> bool:
        return static_format() == "int8" or bool(self.sums.of(_fit_here, values))

    def kernel(self, x: Tensor, held: _Held, form: CallForm) -> Tensor:
        """Compute with the kernel; gradients end here."""
        floats = self.dtype if x.dtype is torch.uint8 else x.dtype
        numbers, output = x, form.output
        if x.dtype is not torch.uint8:
            numbers = self.numbers(x.detach(), form)
        wanted: Int8Result = (1.0, 0, floats, form.activation)
        if output is not None:
            wanted = (output.scale, output.zero_point, torch.uint8, form.activation)
        result = self.product(numbers, held, wanted)
        if output is None:
            result = result.to(floats)
            result = result.to(autocast_dtype(result))
        contiguous = x.is_contiguous() if form.contiguous is None else form.contiguous
        return result.contiguous() if contiguous and output is None else result

    def numbers(self, x: Tensor, form: CallForm) -> Tensor:
        """Return what the kernel reads for floats."""
        return to_numbers(x, self.range.scale, self.range.zero_point, form.factors)

    def simulated(self, x: Tensor, held: _Held, form: CallForm) -> Tensor:
        """Compute what the kernel stands for in floating point."""
        output = form.output
        if x.dtype is torch.uint8:
            x = from_numbers(x, self.range, self.dtype)
        elif not form.is_rounded:
            x = self.range.rounded(x if form.factors is None else _scaled(x, form.factors))
        bias = held.shifted_bias()
        result = self.in_floats(x, held.wide(x), None if bias is None else bias.to(x.dtype))
        result = F.relu(result) if form.activation == "relu" else result
        return result if output is None else to_numbers(result, output.scale, output.zero_point, held.factors)

    def product(self, numbers: Tensor, held: _Held, result: Int8Result) -> Tensor:
        """Compute with the kernel."""
        raise NotImplementedError

    def in_floats(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the layer as torch.nn does."""
        raise NotImplementedError


def _scaled(x: Tensor, factors: Tensor) -> Tensor:
    """Return an input, [..., inputs], times its factors; who traces gets the number of inputs, which may be free there.
    Of a product of sizes [?, ?] and [inputs], rounded to 8 bits, OpenVINO 2026.4 loses the factors.
    """
    if writes_fake_quantization():
        x = x.reshape(*x.shape[:-1], len(factors))
    return x * factors.to(x.dtype)


def _has_kernel(x: Tensor) -> bool:
    if runs_simulation() or not is_plainly_eager() or not x.is_cpu or not x.numel():
        return False
    return x.dtype in _OF_KERNELS and type(x) in (Tensor, nn.Parameter)


def _fit_here(values: Tensor) -> bool:
    """Say whether the kernel's sums hold numbers, which a pickle may have from another CPU; warn where they do not."""
    if reason := why_overflow(values):
        warnings.warn(_FLOATS.format(reason), GuardWarning, stacklevel=2)
    return not reason


def _fake_quantized(weight: Tensor, scales: Tensor) -> Tensor:
    """Say of a weight that numbers of 8 bits stand for that it is one; a folded norm may have turned signs."""
    steps = scales.detach().float().abs().clamp(min=_LEAST).expand(len(weight)).contiguous()
    zeros = torch.zeros(len(weight), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight, steps, zeros, 0, -128, 127)


class _StaticProduct(StaticComputation):
    """Compute a linear layer."""

    def numbers(self, x: Tensor, form: CallForm) -> Tensor:
        """Return what the kernel reads: floats of few rows, if it gives floats, become numbers in there."""
        if form.output is not None or not int8_takes_few_rows(x.numel() // x.shape[-1]):
            return super().numbers(x, form)
        return (x if form.factors is None else x * form.factors.to(x.dtype)).float()

    def product(self, numbers: Tensor, held: _Held, result: Int8Result) -> Tensor:
        """Compute with the kernel."""
        scale, zero_point = self.range.scale, self.range.zero_point
        if int8_takes_few_rows(numbers.numel() // numbers.shape[-1]):
            packed = self.packing.of(_PACK_FOR_FEW, *held, key="few")
            return int8_product_of_few_rows(numbers, scale, zero_point, packed, result)
        packed = self.packing.of(_PACK, *held)
        return int8_product_static(numbers.contiguous(), scale, zero_point, packed, result)

    def in_floats(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the layer as torch.nn does."""
        return F.linear(x, weight, bias)


def _packed_with_factors(
    pack: Callable[..., Any], values: Tensor, scales: Tensor, bias: Tensor | None, factors: Tensor | None,
    shift: Tensor | None,
) -> Any:  # fmt: skip
    bias = _Held(values, scales, bias, shift=shift).shifted_bias()
    if factors is None:
        return pack(values, scales, bias)
    return pack(values, scales * factors, None if bias is None else bias * factors)


_PACK, _PACK_FOR_FEW = (partial(_packed_with_factors, pack) for pack in (int8_static_packed, int8_packed))


class _StaticConvolution(StaticComputation):
    """Compute a convolution along one, two or three dimensions."""

    def __init__(self, of_input: Range, dtype: torch.dtype, geometry: Geometry) -> None:
        super().__init__(of_input, dtype, geometry)
        self.geometry = geometry

    def product(self, numbers: Tensor, held: _Held, result: Int8Result) -> Tensor:
        """Compute with the kernel, on a weight that is packed for the shape: for another one the kernel brings it into
        the right layout at each call, element by element.
        """
        settings, (scale, zero_point) = self.geometry.lists, (self.range.scale, self.range.zero_point)
        rows = numbers if numbers.ndim == held.values.ndim else numbers.unsqueeze(0)
        if rows.ndim == 4:
            rows = rows.contiguous(memory_format=torch.channels_last)  # kernels are slow in making it so themselves
        packed = self.packing.of(partial(self._packed, rows.shape), *held, key=rows.shape, most=_SHAPES)
        found = int8_convolution(rows, scale, zero_point, packed, settings, result)
        return found if numbers.ndim == found.ndim else found.squeeze(0)

    def _packed(self, shape: Sequence[int], *tensors: Any) -> tuple[Any, ...]:
        settings, (scale, zero_point), held = (
            self.geometry.lists,
            (self.range.scale, self.range.zero_point),
            _Held(*tensors),
        )
        bias = held.shifted_bias()
        return int8_convolution_packed(held.values, held.scales, bias, scale, zero_point, settings, shape)

    def in_floats(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the layer as torch.nn does."""
        function: Any = (F.conv1d, F.conv2d, F.conv3d)[weight.ndim - 3]
        stride, padding, dilation, groups = self.geometry.lists
        return function(x, weight, bias, stride, padding, dilation, groups)


class StaticLayer(HoldsWeight):
    """Compute a layer with numbers of 8 bits on both sides; see `StaticComputation`."""

    def __init__(
        self, values: Tensor, scales: Tensor, bias: nn.Parameter | None, dtype: torch.dtype,
        computation: StaticComputation, factors: Tensor | None = None, dim: int = 0, shift: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(values, scales, bias, dtype, dim)
        self.range, self.computation = computation.range, computation
        self.packing = computation.packing
        self.register_buffer("factors", factors, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    def forward(
        self,
        input: Tensor,  # noqa: A002  as torch.nn calls it
        scales: Tensor | None = None,
        bias: Tensor | None = None,
        activation: str = "none",
        output: tuple[float, int] | None = None,
        contiguous: bool | None = None,
        output_factors: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer with a `CallForm`; `scales` and `bias` have a norm folded in."""
        (values, own_scales), own = self.held, own_buffers(self)
        scales, bias = own_scales if scales is None else scales, self.bias if bias is None else bias
        return self.computation(
            input, values, scales, bias, activation, output, contiguous,
            factors=own.get("factors"), output_factors=output_factors, shift=own.get("shift"),
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Return what `repr` shows."""
        return f"weight={list(self.held[0].shape)}, bias={self.bias is not None}, scale={self.range.scale:.3g}"


class StaticLinear(StaticLayer):
    """Compute a linear layer; see `StaticLayer`."""

    def __init__(
        self, values: Tensor, scales: Tensor, bias: nn.Parameter | None, dtype: torch.dtype, of_input: Range,
        factors: Tensor | None = None, dim: int = 0, shift: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(values, scales, bias, dtype, _StaticProduct(of_input, dtype), factors, dim, shift)
        self.out_features, self.in_features = values.shape


class TiedStaticLinear(TiedInt8Linear):
    """Multiply numbers of 8 bits, by a range of the input, with those that are made of a weight which stays."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: int, of_input: Range) -> None:
        super().__init__(weight, bias, group)
        self.range, self.computation = of_input, _StaticProduct(of_input, weight.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Compute with the kernel; the result has the type of the input."""
        values, scales = self.packing.of(self._held, self.weight)
        return self.computation(x, values, scales, self.bias)

    def _held(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantized(weight.detach(), static_format(), self.group)


class StaticConv(StaticLayer):
    """Compute a convolution along one, two or three dimensions; see `StaticLayer`."""

    def __init__(
        self, values: Tensor, scales: Tensor, bias: nn.Parameter | None, dtype: torch.dtype, of_input: Range,
        geometry: Geometry, shift: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(values, scales, bias, dtype, _StaticConvolution(of_input, dtype, geometry), shift=shift)
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


class _StaticWithGradient(torch.autograd.Function):
    """Compute with a kernel; send gradients through what it stands for."""

    @staticmethod
    def forward(
        ctx: Any, computation: StaticComputation, form: CallForm, x: Tensor, values: Tensor, scales: Tensor,
        bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.computation, ctx.form = computation, form
        ctx.save_for_backward(x, values, scales, bias)
        return computation.kernel(
            x, _Held(values, scales, bias, None, form.shift), form
        ).data  # no view of what is in here

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Send gradients through `simulated`; where gradients of these are wanted, they flow on to what came in."""
        ctx.computation.packing.forget_all()  # an optimizer may step on the bias now
        wanted: tuple[bool, ...] = ctx.needs_input_grad[2:]
        given: list[Tensor | None] = list(ctx.saved_tensors)
        is_differentiated = torch.is_grad_enabled()
        if not is_differentiated:
            pairs = zip(given, wanted, strict=True)
            given = [tensor if tensor is None else tensor.detach().requires_grad_(want) for tensor, want in pairs]
        with torch.enable_grad():
            x, *held = cast("list[Any]", given)
            result = ctx.computation.simulated(x, _Held(*held, shift=ctx.form.shift), ctx.form)
        leaves = [tensor for tensor, want in zip(given, wanted, strict=True) if tensor is not None and want]
        found = iter(
            torch.autograd.grad([result], leaves, [gradients[0].to(result.dtype)], create_graph=is_differentiated)
        )
        return None, None, *(next(found) if want else None for want in wanted)

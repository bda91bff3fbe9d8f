"""Convolutions on packed weights, with the activation behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.packed import Geometry, convolution_of, convolution_packed, is_packed
from ...operators import CHANNELS_LAST, derived
from .activations import NO_ACTIVATION, Activation
from .weights import NOTHING, Packed, can_be_packed

__all__ = ["Geometry", "PackedConvolution"]


@dataclass(frozen=True)
class _PackConvolution:
    """Pack the weight of a convolution; return it as it is where that cannot be."""

    geometry: Geometry
    dtype: torch.dtype

    def __call__(self, weight: Tensor) -> Tensor:
        if not can_be_packed(weight) or weight.ndim != self.geometry.rank + 2:
            return weight
        return convolution_packed(weight.detach().to(self.dtype), self.geometry.even)


class PackedConvolution(Packed):
    """Compute a convolution, and the activation behind it, on a packed weight, one for the first size and one for all
    others; or as torch does. `given` and `gives` are types of the input, beside float32, and of the result.
    """

    __name__ = "packed_convolution"

    def __init__(
        self, geometry: Geometry, activation: Activation = NO_ACTIVATION, dtype: torch.dtype = torch.float32,
        given: torch.dtype = torch.float32, gives: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__((geometry, activation, dtype, given, gives), _PackConvolution(geometry, dtype), activation)
        self.geometry, self.dtype, self._dims = geometry, dtype, geometry.rank + 2
        self._given, self._gives, self._taken = given, gives, (torch.float32, given)
        self._is_even = geometry.padding_after is None
        self._places = None if geometry.size is None else tuple(geometry.size[2:])
        self._elsewhere = derived(_PackConvolution(dataclasses.replace(geometry, size=None), dtype), 1)

    @property
    def is_narrow(self) -> bool:
        """Return whether it computes in another type than float32."""
        return self.dtype is not torch.float32

    def with_narrow(self, *, given: bool, gives: bool) -> PackedConvolution:
        """Return the same, on the same packed weights, with an input or a result that may stay as it computes."""
        own = torch.float32, self.dtype
        same = PackedConvolution(self.geometry, self.activation, self.dtype, own[given], own[gives])
        same.weights, same._elsewhere = self.weights, self._elsewhere
        return same

    def _packed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the weight that is packed for images of this size; of one that was released, there is one alone."""
        if self._places is None or x.shape[2:] == self._places or weight.is_meta:
            return self.weights(weight)
        return self._elsewhere(weight)

    def plainly(self, x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None = None) -> Tensor:
        """Compute everything as torch does."""
        if torch.is_grad_enabled() and weight.requires_grad and not torch.compiler.is_dynamo_compiling():
            self._elsewhere.forget(id(weight))
        return super().plainly(x, weight, bias, other)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, other: Tensor | None = None) -> Tensor:
        """Return activation(conv(x, weight, bias) + other), for x [N, channels, ...], or without N."""
        if x.dim() != self._dims or weight.dim() != self._dims:
            return self.plainly(x, weight, bias, other)
        groups, is_transposed = self.geometry.groups, self.geometry.output_padding is not None
        inputs, outputs = weight.size(1) * groups, weight.size(0)
        if is_transposed:
            inputs, outputs = outputs, inputs
        if x.size(1) != inputs or not self.takes(x, weight, bias, other, outputs, self._taken):
            return self.plainly(x, weight, bias, other)
        packed = self._packed(x, weight)
        if not is_packed(packed):
            return self.plainly(x, weight, bias, other)
        kernel, gives = (self._fused, self._gives) if other is None else (self._alone, torch.float32)
        given = x if x.dtype is self.dtype else x.to(self.dtype)
        if self._is_even:
            return self.finished(kernel(given, packed, bias), gives, other)
        wanted = self.geometry.part(x.shape[2:], weight.shape[2:])
        if any(part.stop == part.start for part in wanted[2:]):  # padded, images are smaller than the kernel
            return self.plainly(x, weight, bias, other)
        result = kernel(given, packed, bias)[wanted]
        return self.finished(result.contiguous(memory_format=CHANNELS_LAST[self._dims]), gives, other)

    @cached_property
    def _fused(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        return convolution_of(self.geometry.even, self.post_op)

    @cached_property
    def _alone(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        return convolution_of(self.geometry.even, NOTHING)

    def computed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the convolution as torch does."""
        if x.dtype is self._given and weight.dtype is torch.float32:
            x = x.float()  # it was kept as the convolution before it computes
        its, index = self.geometry, self.geometry.rank - 1
        if its.output_padding is None:
            conv: Any = (F.conv1d, F.conv2d, F.conv3d)[index]
            if its.padding_after is None:
                return conv(x, weight, bias, its.stride, its.padding, its.dilation, its.groups)
            sides = zip(reversed(its.padding), reversed(its.padding_after), strict=True)
            around = F.pad(x, [zeros for side in sides for zeros in side])
            return conv(around, weight, bias, its.stride, 0, its.dilation, its.groups)
        transposed: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[index]
        return transposed(x, weight, bias, its.stride, its.padding, its.output_padding, its.groups, its.dilation)

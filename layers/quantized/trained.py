"""Layers that are trained as they will compute in 8 bits: weights and inputs are rounded, gradients pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...compat import own_buffers, own_parameters
from ...compat.quantized import rounded_with_learned_scale, static_format
from ...runtime.state import dequantized, quantized
from ...runtime.values import in_class, user_class
from .activations import Range

__all__ = [
    "TRAINED", "FakeQuantized", "FakeQuantizedConv1d", "FakeQuantizedConv2d", "FakeQuantizedConv3d",
    "FakeQuantizedLinear", "Freezable", "fake_quantized", "freezable", "freeze",
]  # fmt: skip

_AVERAGING = 0.01
_LARGEST = 255


class _Counting(nn.Module):
    """A module that observes until `freeze_after` training forwards (None: ever); old checkpoints lack its state."""

    _fxopt_added_tensors: ClassVar[tuple[str, ...]] = ("forwards", "frozen")

    freeze_after: int | None
    forwards: Tensor
    frozen: Tensor

    def count_from_zero(self, freeze_after: int | None) -> None:
        """Begin to count."""
        device = next(tensor.device for tensor in (*self.parameters(False), *self.buffers(False)))
        self.freeze_after = freeze_after
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long, device=device))
        self.register_buffer("frozen", torch.zeros((), dtype=torch.long, device=device))

    def count(self) -> None:
        """Note a training forward."""
        self.forwards += 1
        if self.freeze_after is not None and int(self.forwards) > self.freeze_after:
            self.frozen.fill_(1)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        added = {prefix + name for name in self._fxopt_added_tensors}
        missing_keys[:] = [name for name in missing_keys if name not in added]


class FakeQuantized(_Counting):
    """Mix into a layer of torch.nn: it computes with its input and weight rounded to 8 bits. The scale of the weight,
    for each output or for all, is its largest element by 127, or by 63 on CPUs without VNNI; the input's range is a
    moving average, or learned (LSQ).
    """

    _fxopt_is_operation: ClassVar[bool] = True

    _fxopt_added_tensors: ClassVar[tuple[str, ...]] = (
        *_Counting._fxopt_added_tensors, "input_low", "input_high", "input_scale", "input_zero_point",
    )  # fmt: skip

    learns: bool
    group: int

    def observe_from(self, start: Range, learns: bool, freeze_after: int | None, group: int) -> None:
        """Begin with a range of the input."""
        self.learns, self.group = learns, group
        self.count_from_zero(freeze_after)
        scale = torch.tensor([start.scale], device=self.forwards.device)
        zero_point = torch.tensor([start.zero_point], device=self.forwards.device)
        if learns:
            self.register_parameter("input_scale", nn.Parameter(scale))
            self.register_parameter("input_zero_point", nn.Parameter(zero_point.float()))
        else:
            self.register_buffer("input_scale", scale)
            self.register_buffer("input_zero_point", zero_point.int())
            self.register_buffer("input_low", -start.zero_point * scale)
            self.register_buffer("input_high", (_LARGEST - start.zero_point) * scale)

    def observed(self) -> dict[str, Tensor]:
        """Return the state of what observes the input, by name."""
        own: dict[str, Tensor | None] = {**own_parameters(self), **own_buffers(self)}
        found = {name: own.get(name) for name in self._fxopt_added_tensors}
        return {name: tensor.detach() for name, tensor in found.items() if tensor is not None}

    @property
    def input_range(self) -> Range:
        """Return the range of the input as it is now."""
        scale, zero_point = (self.observed()[name] for name in ("input_scale", "input_zero_point"))
        return Range(abs(float(scale)), round(min(max(float(zero_point), 0.0), _LARGEST)))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as torch.nn calls it
        """Compute the layer with its input and weight rounded."""
        if self.training:
            self.count()
        return self._computed(self._rounded(input), self._rounded_weight())

    def _rounded(self, x: Tensor) -> Tensor:
        if self.learns and self.training and not self.frozen:
            own = cast("Any", self)
            return rounded_with_learned_scale(x, own.input_scale, own.input_zero_point, _LARGEST)
        if self.training and not self.frozen and x.numel():
            self._watch(x.detach())
        return self.input_range.rounded(x)

    def _watch(self, x: Tensor) -> None:
        """Move the range towards what is seen."""
        buffers = own_buffers(self)
        low, high = cast("Tensor", buffers["input_low"]), cast("Tensor", buffers["input_high"])
        seen = torch.aminmax(x.float())
        low += _AVERAGING * (seen.min.clamp(max=0) - low)
        high += _AVERAGING * (seen.max.clamp(min=0) - high)
        scale = ((high - low) / _LARGEST).clamp(min=torch.finfo(torch.float32).eps)
        cast("Tensor", buffers["input_scale"]).copy_(scale)
        cast("Tensor", buffers["input_zero_point"]).copy_((-low / scale).round().clamp(0, _LARGEST))

    def _rounded_weight(self) -> Tensor:
        weight = cast("Tensor", cast("Any", self).weight)
        held = quantized(weight.detach(), static_format(), self.group)
        return weight + (dequantized(*held, static_format(), weight.dtype) - weight.detach())

    def _computed(self, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError


class FakeQuantizedLinear(FakeQuantized, nn.Linear):
    """A linear layer that is trained as it will compute in 8 bits."""

    def _computed(self, x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.linear(x, weight, self.bias)


class _Convolution(FakeQuantized):
    def _computed(self, x: Tensor, weight: Tensor) -> Tensor:
        own = cast("Any", self)
        return own._conv_forward(x, weight, own.bias)


class FakeQuantizedConv1d(_Convolution, nn.Conv1d):
    """A convolution that is trained as it will compute in 8 bits."""


class FakeQuantizedConv2d(_Convolution, nn.Conv2d):
    """A convolution that is trained as it will compute in 8 bits."""


class FakeQuantizedConv3d(_Convolution, nn.Conv3d):
    """A convolution that is trained as it will compute in 8 bits."""


class Freezable(_Counting):
    """Mix into a batch norm: after some training forwards it keeps its statistics, and computes with them."""

    _fxopt_is_operation: ClassVar[bool] = True

    def train(self, mode: bool = True) -> Any:
        """Train, unless the statistics are frozen."""
        return super().train(mode and not self.frozen)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as torch.nn calls it
        """Compute the norm, and freeze it when it is time."""
        if self.training:
            self.count()
            self.training = not self.frozen
        return cast("Any", super()).forward(input)


class FreezableBatchNorm1d(Freezable, nn.BatchNorm1d):
    """A batch norm whose statistics can be frozen in training."""


class FreezableBatchNorm2d(Freezable, nn.BatchNorm2d):
    """A batch norm whose statistics can be frozen in training."""


class FreezableBatchNorm3d(Freezable, nn.BatchNorm3d):
    """A batch norm whose statistics can be frozen in training."""


TRAINED: Mapping[type[nn.Module], type[_Counting]] = {
    nn.Linear: FakeQuantizedLinear, nn.Conv1d: FakeQuantizedConv1d, nn.Conv2d: FakeQuantizedConv2d,
    nn.Conv3d: FakeQuantizedConv3d, nn.BatchNorm1d: FreezableBatchNorm1d, nn.BatchNorm2d: FreezableBatchNorm2d,
    nn.BatchNorm3d: FreezableBatchNorm3d,
}  # fmt: skip
"""torch.nn's layer -> the one that is put in its place."""


def fake_quantized(
    layer: nn.Module, start: Range, *, learns: bool, freeze_after: int | None, group: int
) -> FakeQuantized:
    """Return a linear layer or convolution that rounds, on the same tensors; see `FakeQuantized.observe_from`."""
    made = cast("FakeQuantized", in_class(layer, TRAINED[user_class(type(layer))]))
    made.observe_from(start, learns, freeze_after, group)
    return made


def freezable(norm: nn.Module, freeze_after: int | None) -> Freezable:
    """Return a batch norm, on the same tensors, whose statistics can be frozen."""
    made = cast("Freezable", in_class(norm, TRAINED[user_class(type(norm))]))
    made.count_from_zero(freeze_after)
    return made


def freeze(model: nn.Module, *, ranges: bool = True, norms: bool = True) -> None:
    """Keep the ranges of activations, and the statistics of batch norms, as they are from now on, in training too."""
    for module in model.modules():
        if isinstance(module, FakeQuantized) and ranges:
            module.frozen.fill_(1)
        if isinstance(module, Freezable) and norms:
            module.frozen.fill_(1)
            module.train(module.training)

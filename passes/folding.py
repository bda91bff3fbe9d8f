"""The arithmetic of folding a batch norm into the convolution or linear before it, and of taking it out again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Channels", "Folded", "Originals", "fold", "touched", "unfold"]

_UNITS = 4.0
"""Rounding originals and folded tensors to a narrower type moves what they say by up to two units in the last place."""


@dataclass(frozen=True)
class Channels:
    """Where a layer's weight has its output channels.

    Attributes:
        transposed: the weight is [in, out / groups, ...] rather than [out, ...].
        groups: of a transposed convolution; of other layers it does not matter.
    """

    transposed: bool = False
    groups: int = 1

    def spread(self, values: Tensor, weight: Tensor) -> Tensor:
        """Return one value for each output channel, [out], in a shape that multiplies the weight."""
        if not self.transposed:
            return values.reshape(-1, *[1] * (weight.ndim - 1))
        rows = values.view(self.groups, -1).repeat_interleave(weight.shape[0] // self.groups, 0)
        return rows.reshape(*rows.shape, *[1] * (weight.ndim - 2))

    def count(self, weight: Tensor) -> int:
        """Return how many output channels a weight has."""
        return weight.shape[1] * self.groups if self.transposed else weight.shape[0]

    def any_of(self, marks: Tensor) -> Tensor:
        """Return for which output channels, [out], a mark is set in a tensor of the weight's shape."""
        if not self.transposed:
            return marks.flatten(1).any(1)
        return marks.flatten(2).any(2).view(self.groups, -1, marks.shape[1]).any(1).flatten()


class Originals(NamedTuple):
    """What goes into a fold: a layer's weight and bias, and a batch norm's tensors, each [out]."""

    weight: Tensor
    bias: Tensor | None
    gamma: Tensor | None
    beta: Tensor | None
    mean: Tensor
    variance: Tensor

    def wide(self) -> Originals:
        """Return the same in float64."""
        weight, mean, variance = (tensor.detach().double() for tensor in (self.weight, self.mean, self.variance))
        bias, gamma, beta = (_maybe_double(tensor) for tensor in (self.bias, self.gamma, self.beta))
        return Originals(weight, bias, gamma, beta, mean, variance)


class Folded(NamedTuple):
    """What comes out: the weight and bias of a layer that does both."""

    weight: Tensor
    bias: Tensor


def fold(originals: Originals, eps: float, channels: Channels) -> Folded:
    """Return the layer that computes `batch_norm(layer(x))` in evaluation mode.

    It is computed in float64 and rounded once, to the weight's type.
    """
    weight, bias = _fold_wide(originals.wide(), eps, channels)
    return Folded(weight.to(originals.weight.dtype), bias.to(originals.weight.dtype))


def _fold_wide(wide: Originals, eps: float, channels: Channels) -> Folded:
    scale = _scale(wide, eps)
    bias = _shift(wide) * scale if wide.beta is None else _shift(wide) * scale + wide.beta
    return Folded(wide.weight * channels.spread(scale, wide.weight), bias)


def _scale(wide: Originals, eps: float) -> Tensor:
    deviation = (wide.variance + eps).sqrt()
    return 1 / deviation if wide.gamma is None else wide.gamma / deviation


def _shift(wide: Originals) -> Tensor:
    return -wide.mean if wide.bias is None else wide.bias - wide.mean


def touched(folded: Folded, originals: Originals, eps: float, channels: Channels) -> Tensor:
    """Return for which channels, [out], the folded tensors are no longer what the originals give, but for rounding."""
    wide = originals.wide()
    expected, scale = _fold_wide(wide, eps, channels), _scale(wide, eps).abs()
    size = (wide.mean.abs() if wide.bias is None else wide.bias.abs() + wide.mean.abs()) * scale
    size = size if wide.beta is None else size + wide.beta.abs()
    of_weight = _is_off(folded.weight, expected.weight, expected.weight.abs(), channels.spread(scale, wide.weight))
    return channels.any_of(of_weight) | _is_off(folded.bias, expected.bias, size, scale)


def _is_off(found: Tensor, expected: Tensor, size: Tensor, scale: Tensor) -> Tensor:
    kind = torch.finfo(_rounded_to(found))
    slack = _UNITS * kind.eps * (size + kind.tiny * (1 + scale))
    found = found.detach().double()
    return ~(((found - expected).abs() <= slack) | (found == expected) | (found.isnan() & expected.isnan()))


def _rounded_to(tensor: Tensor) -> torch.dtype:
    """Return the coarsest type that a tensor has been rounded to, judging by its values."""
    narrower = (k for k in (torch.bfloat16, torch.float16, torch.float32) if k.itemsize < tensor.dtype.itemsize)
    return next((k for k in narrower if torch.equal(tensor.to(k).to(tensor.dtype), tensor)), tensor.dtype)


def unfold(folded: Folded, originals: Originals, eps: float, channels: Channels, which: Tensor) -> Originals:
    """Return originals that fold to `folded` in the channels `which`, [out], and are as given in the others.

    There the norm's gamma is made the deviation, so that the norm scales by one; without a gamma, the weight makes up
    for the scale. The bias goes to where there is room for it: beta, the layer's bias, or the mean.
    """
    wide = originals.wide()
    if originals.gamma is not None:
        wide = wide._replace(gamma=(wide.variance + eps).sqrt().to(originals.gamma.dtype).double())
    scale, bias = _scale(wide, eps), folded.bias.detach().double()
    made = wide._replace(weight=folded.weight.detach().double() / channels.spread(scale, wide.weight))
    if wide.beta is not None:
        made = made._replace(beta=bias - _shift(wide) * scale)
    elif wide.bias is not None:
        made = made._replace(bias=bias / scale + wide.mean)
    else:
        made = made._replace(mean=-bias / scale)
    return _chosen(made, originals, channels.spread(which, wide.weight), which)


def _chosen(made: Originals, originals: Originals, of_weight: Tensor, which: Tensor) -> Originals:
    """Return what was made where it is wanted, in the original types."""

    def chosen(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(which, new.to(old.dtype), old.detach())

    def maybe(new: Tensor | None, old: Tensor | None) -> Tensor | None:
        return None if new is None or old is None else chosen(new, old)

    return Originals(
        weight=torch.where(of_weight, made.weight.to(originals.weight.dtype), originals.weight.detach()),
        bias=maybe(made.bias, originals.bias),
        gamma=maybe(made.gamma, originals.gamma),
        beta=maybe(made.beta, originals.beta),
        mean=chosen(made.mean, originals.mean),
        variance=originals.variance,
    )


def _maybe_double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().double()

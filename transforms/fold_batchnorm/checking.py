"""Whether folded tensors make of a layer what a layer and its batch norm do: each pair is compared in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ...passes.verification import Tolerance, distance, scale_of
from .arithmetic import Fold

__all__ = ["fault"]

_MOST = 1e-10
"""What a fold may be off by in float64, relative to what it computes with."""


def fault(layer: nn.Module, norm: nn.BatchNorm1d, fold: Fold, tensors: Sequence[Tensor]) -> str:
    """Return how far off a layer with folded tensors is, or "" where that is rounding.

    Args:
        layer, norm: in evaluation.
        fold: of the two.
        tensors: what it is called with.
    """
    if any(tensor.is_meta or not tensor.numel() for tensor in tensors):
        return ""
    with torch.no_grad():
        wide = [each.double() if each.is_floating_point() else each for each in tensors]
        own = dict(zip(fold.layer_tensors, wide, strict=False))
        x = _input(layer, wide[0])
        between = functional_call(layer, own, (x,))
        expected = _normed(norm, between, dict(zip(fold.norm_tensors, wide[len(own) :], strict=False)))
        weight, bias = fold(*wide)
        if fold.biased:
            found = functional_call(layer, {"weight": weight, "bias": bias}, (x,))
        else:
            found = functional_call(layer, {"weight": weight}, (x,)) + bias.view(-1, *[1] * (between.ndim - 2))
        seen = distance(expected, found, Tolerance(0.0, _MOST * max(scale_of(expected), scale_of(bias))))
    return f"folded, it is off by {seen.error:.1e} of the scale in float64" if seen.problem else ""


def _input(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return an input that gives the layer one place to compute at, or a few."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(layer, nn.Linear):
        shape = 2, layer.in_features
    else:
        conv = cast("nn.Conv2d", layer)
        reach = [(size - 1) * step + 1 for size, step in zip(conv.kernel_size, conv.dilation, strict=True)]
        shape = 1, conv.in_channels, *(each if conv.padding_mode == "zeros" else 2 * each for each in reach)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(weight.device)


def _normed(norm: nn.BatchNorm1d, x: Tensor, own: dict[str, Tensor]) -> Tensor:
    mean, variance = own["running_mean"], own["running_var"]
    return F.batch_norm(x, mean, variance, own.get("weight"), own.get("bias"), False, 0.0, norm.eps)

"""Whether folded tensors make of a layer what a layer and its batch norm do: each pair is compared in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layers.folded import Fold
from ...passes.rewriting import LayerCall
from ...passes.verification import MEANING, Tolerance, distance, scale_of
from .parts import Norm

__all__ = ["reason_against_fold"]


def reason_against_fold(layer: LayerCall, norm: Norm, fold: Fold, tensors: Sequence[Tensor]) -> str:
    """Return how far off a layer with folded `tensors`, these or others, is, or "" where that is rounding."""
    if any(tensor.is_meta or not tensor.numel() for tensor in tensors):
        return ""
    wide = [each.detach().double() if each.is_floating_point() else each for each in tensors]
    with torch.no_grad():
        reason = _difference(layer, norm, fold, wide)
        return reason if reason or fold.masked else _difference(layer, norm, fold, _drawn(fold, wide))


def _difference(layer: LayerCall, norm: Norm, fold: Fold, wide: Sequence[Tensor]) -> str:
    own = dict(zip(fold.layer_tensors, wide, strict=False))
    statistics = dict(zip(fold.norm_tensors, wide[len(own) :], strict=False))
    x = _input(layer, wide[0])
    if fold.before:
        between = _normed(norm, x, statistics)
        expected = layer.compute(between, own)
    else:
        between = layer.compute(x, own)
        expected = _normed(norm, between, statistics)
    weight, bias = fold(*wide)
    own = {"weight": weight, "bias": bias} if fold.biased else {"weight": weight}
    found = layer.compute(x, own)
    if not fold.biased:
        found = found + bias.view(-1, *[1] * layer.rank)
    seen = distance(expected, found, Tolerance(0.0, MEANING * max(scale_of(expected), scale_of(bias))))
    return f"folded, it is off by {seen.error:.1e} of the scale in float64" if seen.reason else ""


def _drawn(fold: Fold, wide: Sequence[Tensor]) -> list[Tensor]:
    """Return other tensors in the place of all floats; variances stay positive."""
    generator = torch.Generator().manual_seed(1)
    names = (*fold.layer_tensors, *fold.norm_tensors)
    drawn: list[Tensor] = []
    for name, each in zip(names, wide, strict=False):
        if not each.is_floating_point():
            drawn.append(each)
            continue
        value = torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each.device)
        drawn.append(value.square() + 0.5 if name == "running_var" else value)
    return [*drawn, *wide[len(drawn) :]]


def _input(layer: LayerCall, weight: Tensor) -> Tensor:
    """Return an input that gives the layer one place to compute at, or a few."""
    generator = torch.Generator().manual_seed(0)
    reach = [(size - 1) * step + 1 for size, step in zip(layer.kernel, layer.dilation, strict=True)]
    places = [each if layer.mode == "zeros" else 2 * each for each in reach]
    shape = 1 if places else 2, layer.channels[0], *places
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(weight.device)


def _normed(norm: Norm, x: Tensor, own: dict[str, Tensor]) -> Tensor:
    mean, variance = own["running_mean"], own["running_var"]
    return F.batch_norm(x, mean, variance, own.get("weight"), own.get("bias"), False, 0.0, norm.eps)

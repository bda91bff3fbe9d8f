"""How much the results of a model depend on each layer: measured once, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..compat import modules_by_name, own_parameters
from ..tracing.examples import Inputs
from ..transforms.comparing import ComparedRun
from ..transforms.quantize import costs

__all__ = ["Sensitivities", "sensitivities", "weighted"]

_LEVELS = 7
"""Weights are rounded to 4 bits, in which every layer shows: what is coarser orders layers as 8 bits would."""
_WEIGHTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Sensitivities:
    """Layer -> how far results are off, of their scale: with its weight in 4 bits, and without half of its outputs."""

    bits: Mapping[str, float]
    units: Mapping[str, float]


def sensitivities(model: nn.Module, calls: Sequence[Inputs]) -> Sensitivities:
    """Measure each linear layer and convolution of a model by itself, on the first call or a smaller one."""
    layers = weighted(model)
    names = {module: name for name, module in layers.items()}

    def measured(change: Callable[[Tensor], Tensor]) -> dict[str, float]:
        run = ComparedRun[nn.Module](model, calls[:1], lambda layer: _changed(layer, change)).on_less()
        return {names[layer]: cost for layer, cost in costs(layers.values(), run.error).items()}

    return Sensitivities(measured(_rounded), measured(_halved))


def weighted(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that are looked at, by name: those that hold their weight themselves."""
    return {
        name: each for name, each in modules_by_name(model).items()
        if isinstance(each, _WEIGHTS) and own_parameters(each).get("weight") is not None
    }  # fmt: skip


@contextmanager
def _changed(layer: nn.Module, change: Callable[[Tensor], Tensor]) -> Generator[None]:
    """Let a layer have another weight for a while."""
    weight = layer.get_parameter("weight")
    before = weight.data
    weight.data = change(before)
    try:
        yield
    finally:
        weight.data = before


def _rounded(weight: Tensor) -> Tensor:
    """Return a weight in 4 bits, with a scale for each output."""
    rows = weight.flatten(1)
    scale = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny) / _LEVELS
    return ((rows / scale).round() * scale).view_as(weight)


def _halved(weight: Tensor) -> Tensor:
    """Return a weight without the half of its outputs that are smallest."""
    norms = weight.flatten(1).square().sum(1)
    kept = norms >= norms.median()
    return weight * kept.view(-1, *[1] * (weight.dim() - 1))

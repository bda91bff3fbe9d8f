"""Which layers stay in floats, so that the whole model is within the budget: those that cost the most."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from torch import nn

from ...passes.timing import within_left
from ...progress_bar import progress_bar
from ...tracing.program import Program
from ..comparing import ComparedRun, computing
from .judging import Judge, Measurement
from .options import Options

__all__ = ["costs", "costs_in_groups", "left_in_floats", "left_out"]

Layer = TypeVar("Layer")

_MARGIN = 0.9
"""Of the budget: other calls err by a little more than the first."""

_OF_LEFT = 0.5
"""Layers are told apart for so large a part of the time that is left for sites; the others have to be written, too."""

_SURELY = 0.8
"""So much of what is allowed is aimed at: the largest error does not add up quite as squares do."""


def left_in_floats(
    program: Program,
    layers: Mapping[nn.Module, nn.Module],
    options: Options,
    base: Mapping[nn.Module, nn.Module] | None = None,
) -> tuple[dict[nn.Module, str], Measurement | None]:
    """Return the layers to leave out, those first that cost most for their size, each with the reason; and the metric
    with the others replaced. What is left out stays as it is, or as `base` has it.
    """
    if not program.whole_calls or not layers:
        return {}, None
    run = ComparedRun[nn.Module](
        program.model,
        program.whole_calls[:1],
        lambda layer: computing(layer, layers[layer]),
        {layer: partial(computing, layer, other) for layer, other in (base or {}).items()},
    )
    judge = Judge(run, options, _MARGIN)
    lost = judge.loss(list(layers))
    if lost <= judge.allowed:
        return {}, judge.measured(layers)
    replaced = [module for module in program.names.distinct if module in layers]
    sizes = {module: sum(each.numel() for each in module.parameters()) for module in replaced}
    # A metric says nothing of how exact results must be: then each layer is looked at.
    alone = costs_in_groups(sizes, run.on_less().error, judge.allowed if options.metric is None else 0.0)
    density = {layer: cost**2 / sizes[layer] for layer, cost in alone.items()}
    option = "budget" if options.metric is None else "drop"
    left = {
        layer: f"{judge.said(lost)}; this layer alone moves its results by about {alone[layer]:.2g} of their scale; "
        f"raise {option}= to quantize it too"
        for layer in left_out(density, judge.loss, judge.allowed)
    }
    return left, judge.measured(layers.keys() - left.keys())


def costs_in_groups(
    sizes: Mapping[Layer, int], error: Callable[[Sequence[Layer]], float], allowed: float
) -> dict[Layer, float]:
    """Return about what each layer alone costs: the group that costs most for its size is halved till the rest fits.
    Where nothing is `allowed`, each is measured. Both end where half the time is spent that was left for sites.
    """
    layers = list(sizes)
    groups: list[_Group[Layer]] = [_Group.of(layers, sizes, error)]
    rest = groups[0].cost ** 2
    alone: dict[Layer, float] = {}
    least = math.ceil(math.log2(len(layers)))  # halvings that find one layer
    halvings, end = itertools.count(), within_left(math.inf, _OF_LEFT)
    with progress_bar("fxopt: measuring layers", len(layers)) as move:
        while groups and rest > (_SURELY * allowed) ** 2:
            if next(halvings) >= least and within_left(math.inf, 1.0) <= end < math.inf:
                break
            group = groups.pop(max(range(len(groups)), key=lambda number: groups[number].density))
            if len(group.layers) == 1:
                alone[group.layers[0]] = group.cost
                rest -= group.cost**2
                move(1)
                continue
            middle = len(group.layers) // 2
            groups += [_Group.of(half, sizes, error) for half in (group.layers[:middle], group.layers[middle:])]
        move(sum(len(group.layers) for group in groups))
    return alone | {layer: group.cost / math.sqrt(len(group.layers)) for group in groups for layer in group.layers}


@dataclass(frozen=True)
class _Group(Generic[Layer]):
    """Layers, by how much the results are off with all of them in fewer bits, and their size."""

    layers: Sequence[Layer]
    cost: float
    size: int

    @classmethod
    def of(
        cls, layers: Sequence[Layer], sizes: Mapping[Layer, int], error: Callable[[Sequence[Layer]], float]
    ) -> _Group[Layer]:
        return cls(layers, error(layers), sum(sizes[layer] for layer in layers))

    @property
    def density(self) -> float:
        return self.cost**2 / self.size


def costs(layers: Iterable[Layer], error: Callable[[Sequence[Layer]], float]) -> dict[Layer, float]:
    """Return by how much a model's results are off where one layer alone computes in fewer bits."""
    every = list(layers)
    alone: dict[Layer, float] = {}
    with progress_bar("fxopt: measuring layers", len(every)) as move:
        for layer in every:
            alone[layer] = error([layer])
            move(1)
    return alone


def left_out(
    alone: Mapping[Layer, float], error: Callable[[Sequence[Layer]], float], allowed: float
) -> Sequence[Layer]:
    """Return the layers to leave in floats, by what each costs `alone`, so that the others err no more than allowed."""
    order = sorted(alone, key=alone.__getitem__, reverse=True)
    # More layers in floats are taken to err less, so that the count can be found by halving.
    wrong, right = 0, len(order)
    while right - wrong > 1:
        middle = (wrong + right) // 2
        wrong, right = (wrong, middle) if error(order[middle:]) <= allowed else (middle, right)
    return order[:right]

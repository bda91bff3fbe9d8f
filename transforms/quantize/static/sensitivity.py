"""Which layers stay in floats, so that the whole model is within the budget: those that cost the most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....layers.quantized import Range
from ....tracing.examples import Inputs
from ....tracing.program import Program
from ..within import costs, left_out
from .simulation import RoundedModel

__all__ = ["Sensitivity", "sensitivity", "unknown"]


@dataclass(frozen=True)
class Sensitivity:
    """What quantizing layers costs, relative to the scale of what is compared.

    Attributes:
        own: layer -> by how much its own result is off.
        alone: layer -> by how much the model's results are off where this layer alone is quantized, on a smaller call
            where the model takes one; empty where all layers together are within the budget.
        left: the layers that stay in floats, the most costly first.
        error: by how much the model's results are off with all the others.
        together: by how much they are off with all layers.
    """

    own: Mapping[str, float]
    alone: Mapping[str, float]
    left: Sequence[str]
    error: float
    together: float


def unknown(ranges: Mapping[str, Range]) -> Sensitivity:
    """Return what is known where there is no call to run: nothing."""
    return Sensitivity(dict.fromkeys(ranges, 0.0), {}, (), 0.0, 0.0)


def sensitivity(program: Program, ranges: Mapping[str, Range], group: int, call: Inputs, budget: float) -> Sensitivity:
    """Simulate the quantized model on a call, and leave out as few layers as bring it within a budget.

    In which order they are left out a smaller call says well enough; what is within the budget only the whole one.
    """
    simulation = RoundedModel(program, ranges, group, call)
    whole = simulation.error(ranges)
    if whole <= budget:
        return Sensitivity(simulation.own_errors, {}, (), whole, whole)
    alone = costs(ranges, simulation.on_less().error)
    left, error = left_out(alone, simulation.error, budget)
    return Sensitivity(simulation.own_errors, alone, left, error, whole)

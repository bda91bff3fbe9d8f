"""How far what a few rows have shown to be the same in float64 may be off in its own types: as rounding moves it.

Where rounding puts a ReLU on its other side, gradients of the original jump, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..allowances import beside_neighbours
from ..compare import deviation, scale_of
from ..outcome import Quantities, differentiable, is_gradient
from ..tolerances import AT_A_PLACE, IN_MEAN, JUMP_UNITS, JUMPS, UNITS, Tolerance

__all__ = ["Jumps", "are_far_off"]


@dataclass
class Jumps:
    """How far the original was seen to move. One ReLU moves few elements far, and others at each time: of all
    gradients the farthest place counts. In the mean one gradient jumps about as far each time.
    """

    place: float = 0.0  # the farthest that any element of a gradient moved, relative to its scale
    # by label, how far a gradient moved in the root of the mean square, relative to that of itself
    means: dict[str, float] = field(default_factory=dict[str, float])
    # by label, how far any other value is moved by rounding, relative to its scale
    results: dict[str, float] = field(default_factory=dict[str, float])

    def learn(self, exact: Quantities, other: Quantities, units: float) -> None:
        """Note how far the original, with inputs and state off by so many units, is from the exact one."""
        for label, unit, place in _places(exact, other):
            if is_gradient(label):
                self.place = max(self.place, place)
                self.means[label] = max(self.means.get(label, 0.0), _in_mean(exact[label], other[label], unit))
            else:
                self.results[label] = max(self.results.get(label, 0.0), place * min(1.0, UNITS / units))

    def allowed(self, before: Quantities, found: Quantities, close: Mapping[str, Tolerance]) -> dict[str, Tolerance]:
        """Return what values may be off by: what is `close`, and more; of a gradient, where the mean allows it."""
        allowed = dict(close)
        for label, unit, place in _places(before, found):
            if not is_gradient(label):
                more = JUMPS * self.results.get(label, 0.0) * unit + _rounding_of_terms(label, before)
                allowed[label] = replace(close[label], absolute=close[label].absolute + more)
            elif place * unit > close[label].absolute:
                most = min(JUMPS * self.means.get(label, 0.0), IN_MEAN)
                if _in_mean(before[label], found[label], unit) <= most:
                    allowed[label] = replace(close[label], absolute=min(JUMPS * self.place, AT_A_PLACE) * unit)
        return allowed


def are_far_off(before: Quantities, found: Quantities, close: Mapping[str, Tolerance]) -> bool:
    """Say whether gradients are off by more than is allowed however far those of the original jump."""
    allowed = Jumps(math.inf, dict.fromkeys(before, math.inf)).allowed(before, found, close)
    places = _places(before, found)
    return any(is_gradient(label) and place * unit > allowed[label].absolute for label, unit, place in places)


def _places(before: Quantities, after: Quantities) -> Iterator[tuple[str, float, float]]:
    """Yield the scale of each float tensor, and how far the other one is off at one place, relative to it."""
    for label, unit in beside_neighbours(before, 1.0).items():
        found, can_move = after.get(label), unit and differentiable(before[label])
        if can_move and isinstance(found, Tensor) and found.shape == before[label].shape:
            yield label, unit, deviation(before[label], found) / unit


def _rounding_of_terms(label: str, values: Quantities) -> float:
    """Return what rounding leaves of a running mean of zero: it is relative to the terms, of which torch adds many."""
    name, _, kind = label.rpartition(".")
    variance = values.get(f"{name}.running_var")
    if kind != "running_mean" or not isinstance(variance, Tensor):
        return 0.0
    return JUMP_UNITS * torch.finfo(variance.dtype).eps * scale_of(variance) ** 0.5


def _in_mean(expected: Tensor, found: Tensor, unit: float) -> float:
    """Return how far a gradient is off in the mean, relative to itself as if `unit` were its scale."""
    own = scale_of(expected)
    usual = _mean(expected) * unit / own if own else unit
    return _mean(found - expected) / usual


def _mean(tensor: Tensor) -> float:
    """Return the root of the mean square."""
    return math.sqrt(float(tensor.double().square().mean()))

"""How far what a few rows have shown to be the same in float64 may be off in its own types: as rounding moves it.

Where rounding puts a ReLU on its other side, gradients of the original jump, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..compare import Tolerance, deviation, scale_of
from ..execution import differentiable
from ..tolerances import beside_neighbours
from ..translation import Quantities, is_gradient

__all__ = ["JUMP_UNITS", "Jumps", "are_far_off"]

JUMP_UNITS = 32.0
"""Inputs and state are off by so many units in the last place where it is learned how far gradients jump: with fewer,
none of few ReLUs may fall on its other side."""

_UNITS = 4.0
"""Rounding moves results as far as so many units do; where more units moved them, a part of that counts."""

_FACTOR = 4.0
"""All may be off by four times as much as was seen."""

_MOST_IN_MEAN = 0.1
_MOST_AT_A_PLACE = 0.5
"""However far those jump, no gradient is off by more than a tenth of itself in the root of the mean square, and in no
place by half of its scale. Chosen: on images that lie channels last, those of a ResNet-18 are off by 0.01 and 0.12, of
a ResNet-50 by 0.05 and 0.22."""


@dataclass
class Jumps:
    """How far the original was seen to move.

    One ReLU moves few elements far, and others at each time: of all gradients, the farthest place counts. In the mean
    one gradient jumps about as far each time.

    Attributes:
        place: the farthest that any element of a gradient moved, relative to its scale.
        means: by label, how far a gradient moved in the root of the mean square, relative to that of itself.
        results: by label, how far any other value is moved by rounding, relative to its scale.
    """

    place: float = 0.0
    means: dict[str, float] = field(default_factory=dict[str, float])
    results: dict[str, float] = field(default_factory=dict[str, float])

    def learn(self, exact: Quantities, other: Quantities, units: float) -> None:
        """Note how far the original, with inputs and state off by so many units, is from the exact one."""
        for label, unit, place in _places(exact, other):
            if is_gradient(label):
                self.place = max(self.place, place)
                self.means[label] = max(self.means.get(label, 0.0), _in_mean(exact[label], other[label], unit))
            else:
                self.results[label] = max(self.results.get(label, 0.0), place * min(1.0, _UNITS / units))

    def allowed(self, before: Quantities, found: Quantities, close: Mapping[str, Tolerance]) -> dict[str, Tolerance]:
        """Return what values may be off by: what is `close`, and more; of a gradient, where the mean allows it."""
        allowed = dict(close)
        for label, unit, place in _places(before, found):
            if not is_gradient(label):
                more = _FACTOR * self.results.get(label, 0.0) * unit + _rounding_of_terms(label, before)
                allowed[label] = replace(close[label], absolute=close[label].absolute + more)
            elif place * unit > close[label].absolute:
                most = min(_FACTOR * self.means.get(label, 0.0), _MOST_IN_MEAN)
                if _in_mean(before[label], found[label], unit) <= most:
                    allowed[label] = replace(close[label], absolute=self._at_a_place * unit)
        return allowed

    @property
    def _at_a_place(self) -> float:
        return min(_FACTOR * self.place, _MOST_AT_A_PLACE)


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

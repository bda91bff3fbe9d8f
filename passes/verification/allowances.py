"""What rounding honestly does to each quantity, read off the original itself."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch import Tensor

from .compare import deviation, scale_of
from .outcome import GRADIENT, Quantities, differentiable, is_gradient
from .tolerances import (
    AS_GOOD_AS_ZERO,
    AT_A_PLACE,
    CANCELLED,
    DERIVED,
    EXACT,
    FLIPS,
    IN_MEAN,
    JUMP_UNITS,
    JUMPS,
    NATIVE_FACTOR,
    NATIVE_UNITS,
    NOISE,
    NOTHING,
    REPORTED,
    RESPONSE,
    SAFETY,
    SMALL,
    UNITS,
    Tolerance,
)

__all__ = [
    "Allowances", "Jumps", "Measured", "are_far_off", "beside_neighbours", "gradients_within", "is_drowned",
    "learn_peer", "learn_response", "within",
]  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One sample of the original under the new names."""

    exact: Quantities  # what the exact run yielded
    native: Quantities | None  # what the run in the module's own types yielded, if there was one


@dataclass
class _Seen:
    """How far rounding was seen to move tensors, by label: floats by distance, integers by number of places."""

    distance: dict[str, float] = field(default_factory=dict[str, float])
    places: dict[str, int] = field(default_factory=dict[str, int])

    def note(self, label: str, distance: float, places: int = 0) -> None:
        self.distance[label] = max(distance, self.distance.get(label, 0.0))
        self.places[label] = max(places, self.places.get(label, 0))


class Allowances:
    """Turn rounding errors that were seen into tolerances: those of the original, `measured` in its own types; more is
    learned from noise where a ReLU or an argmax may fall on either side. `is_rounded`: there are new tensors, made in
    the module's own types; `least`: what may differ in any case.
    """

    def __init__(
        self, native_epsilon: float, wide: torch.dtype | None, measured: Sequence[Measured],
        *, is_rounded: bool, least: Mapping[str, Tolerance] | None = None,
    ) -> None:  # fmt: skip
        self.native_epsilon, self.is_rounded, self._least = native_epsilon, is_rounded, least or {}
        self.wide_epsilon = native_epsilon if wide is None else torch.finfo(wide).eps
        self._exact, self._native = _Seen(), _Seen()
        for sample in measured:
            if sample.native is not None:
                self.learn_native(sample.exact, sample.native)

    @property
    def native_is_coarser(self) -> bool:
        """Say whether runs in the module's own types tell anything that the exact ones do not."""
        return self.native_epsilon > self.wide_epsilon

    def with_native(self, exact: Quantities, native: Quantities) -> Allowances:
        """Return others that know besides how far `native` is from `exact`; what they learn is theirs alone."""
        other = copy.copy(self)
        other._exact, other._native = copy.deepcopy(self._exact), copy.deepcopy(self._native)
        other.learn_native(exact, native)
        return other

    def learn_native(self, exact: Quantities, other: Quantities) -> None:
        """Note how far `other`, which rounding in the module's own types moved, is from `exact`."""
        shrink = self.wide_epsilon / self.native_epsilon
        for label, (scale, _) in _scales(exact).items():
            moved, places = _moved(exact[label], other.get(label))
            self._native.note(label, moved / scale if scale else 0.0, places)
            if differentiable(exact[label]):
                self._exact.note(label, moved * shrink if self.native_is_coarser else 0.0)

    def learn_jumps(self, exact: Quantities, other: Quantities) -> None:
        """Note how far gradients of `other`, with more noise than rounding makes, are from `exact`: one ReLU on
        its other side moves them as far as it does, however little noise it took.
        """
        for label, (scale, _) in _scales(exact).items():
            if is_gradient(label) and scale:
                self._native.note(label, _moved(exact[label], other.get(label))[0] / scale)

    def learn_exact(self, exact: Quantities, other: Quantities) -> None:
        """Note how far `other`, an exact run with the last bits of its inputs changed, is from `exact`."""
        for label in _scales(exact):
            self._exact.note(label, *_moved(exact[label], other.get(label)))

    def for_meaning(
        self, sample: Measured, wide: torch.dtype | None, *, is_derived: bool = False
    ) -> dict[str, Tolerance]:
        """Return, for each tensor of a sample, what an exact run of the rewritten module may differ by."""
        if self.is_rounded:
            return self.for_precision(sample)
        units = UNITS * self.native_epsilon
        base = Tolerance(units, units) if wide is None else EXACT[wide]
        more = DERIVED if is_derived else 1.0
        return {
            label: Tolerance(
                more * base.relative,
                more * base.absolute * scale
                + SAFETY * self._exact.distance.get(label, 0.0)
                + self.wide_epsilon * around * (CANCELLED if is_gradient(label) else 1.0),
                self._unit(label, scale, around),
                FLIPS * self._exact.places.get(label, 0),
            )
            for label, (scale, around) in _scales(sample.exact).items()
        }

    def for_precision(self, sample: Measured) -> dict[str, Tolerance]:
        """Return, for each tensor of a sample, what the rewritten module may err by in its own types."""
        known = [error for error in self._native.distance.values() if error > 0]
        typical = median(known) if known else 0.0
        least = NOTHING if self.native_is_coarser else EXACT[torch.float64]
        return {
            label: Tolerance(
                least.relative,
                max(
                    self._least[label].absolute if label in self._least else 0.0,
                    least.absolute * scale
                    + self._share(sample, label, typical) * max(scale, AS_GOOD_AS_ZERO * around)
                    + self._cancelled(sample, label, scale, around),
                ),
                self._unit(label, scale, around),
                FLIPS * self._native.places.get(label, 0),
            )
            for label, (scale, around) in _scales(sample.exact).items()
        }

    def _unit(self, label: str, scale: float, around: float) -> float:
        """Return what errors are reported relative to: for what is mere rounding noise, its neighbours' scale."""
        is_noise = self._native.distance.get(label, 0.0) > NOISE
        return around if is_noise else max(scale, REPORTED * around)

    def _share(self, sample: Measured, label: str, typical: float) -> float:
        """Return what part of its scale a tensor may be off by; `typical` tensors were."""
        own = self._native.distance.get(label, 0.0)
        if sample.exact[label].numel() < SMALL:
            own = max(own, typical)
        return NATIVE_FACTOR * own + NATIVE_UNITS * self._epsilon(sample, label)

    def _cancelled(self, sample: Measured, label: str, scale: float, around: float) -> float:
        """Return what a gradient may be off by that is zero but for exact rounding: all that is seen of it is noise."""
        if not is_gradient(label) or scale > CANCELLED * self.wide_epsilon * around:
            return 0.0
        return min(CANCELLED * self._epsilon(sample, label), NOISE) * around

    def _epsilon(self, sample: Measured, label: str) -> float:
        native = (sample.native or {}).get(label)
        if not isinstance(native, Tensor) or native.dtype is torch.float64 or not native.is_floating_point():
            return self.native_epsilon
        return torch.finfo(native.dtype).eps


def learn_response(responses: dict[str, float], exact: Quantities, other: Quantities) -> None:
    """Note in `responses` how far gradients of the original move where its inputs and state are off by an error."""
    for label in filter(is_gradient, _scales(exact)):
        responses[label] = max(responses.get(label, 0.0), _moved(exact[label], other.get(label))[0])


def learn_peer(errors: dict[str, float], expected: Quantities, peer: Quantities) -> None:
    """Note in `errors` how far off the original is where torch makes the same approximation."""
    errors.update({label: _moved(expected[label], peer.get(label))[0] for label in _scales(expected)})


def within(
    values: Quantities, budget: float, responses: Mapping[str, float] | None = None,
    peer: Mapping[str, float] | None = None,
) -> dict[str, Tolerance]:  # fmt: skip
    """Return tolerances that allow each tensor an error of `budget`, relative to its scale, and that of a `peer`
    besides; integers may change. A gradient is judged beside its neighbours where that hides it, and may move twice as
    far as in `responses`.
    """
    units, moved, errors = beside_neighbours(values, budget), responses or {}, peer or {}
    allowed = {
        label: budget * unit + errors.get(label, 0.0) + RESPONSE * moved.get(label, 0.0)
        for label, unit in units.items()
    }
    return {label: Tolerance(0.0, allowed[label], unit, values[label].numel()) for label, unit in units.items()}


def gradients_within(gradients: Mapping[str, Tensor], share: float) -> dict[str, Tolerance]:
    """Return tolerances that allow the gradient of each parameter, by name, an error of a share of its scale."""
    labelled = {f"{GRADIENT}{name}": gradient for name, gradient in gradients.items()}
    return {label.removeprefix(GRADIENT): tolerance for label, tolerance in within(labelled, share).items()}


def beside_neighbours(values: Quantities, share: float) -> dict[str, float]:
    """Return each tensor's scale. For a gradient that is no larger than a share of its module's (of a key's bias in
    attention, which is zero but for rounding) it is the module's, or that of all gradients if these are zero too.
    """
    scales = _scales(values)
    layers: dict[str, float] = {}
    for label, (scale, _) in scales.items():
        layers[_layer(label)] = max(scale, layers.get(_layer(label), 0.0))
    units: dict[str, float] = {}
    for label, (scale, around) in scales.items():
        layer, least = layers[_layer(label)], AS_GOOD_AS_ZERO * around
        unit = layer if scale <= share * layer else scale
        units[label] = around if is_gradient(label) and unit <= least else max(unit, least)
    return units


def is_drowned(exact: Quantities, native: Quantities) -> bool:
    """Say whether rounding alone makes more than half of a gradient: no run in these types says how exact one is."""
    gradients = {label: value for label, value in exact.items() if is_gradient(label)}
    units = beside_neighbours(gradients, 1.0)
    return any(_moved(gradients[label], native.get(label))[0] > NOISE * unit for label, unit in units.items())


def _layer(label: str) -> str:
    return label.rpartition(".")[0] if is_gradient(label) else label


def _moved(expected: Tensor, found: object) -> tuple[float, int]:
    """Return how far a float tensor moved, or in how many places another one changed."""
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return 0.0, 0
    if differentiable(expected):
        return deviation(expected, found), 0
    return 0.0, int((expected != found).sum())


def _scales(exact: Quantities) -> dict[str, tuple[float, float]]:
    """Return each tensor's scale, and the largest scale among its kind (gradients, or everything else)."""
    tensors = {label: value for label, value in exact.items() if isinstance(value, Tensor)}
    own = {label: scale_of(value) if differentiable(value) else 0.0 for label, value in tensors.items()}
    around = {False: 0.0, True: 0.0}
    for label, scale in own.items():
        around[is_gradient(label)] = max(around[is_gradient(label)], scale)
    return {label: (scale, around[is_gradient(label)]) for label, scale in own.items()}


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

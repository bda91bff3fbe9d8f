"""What rounding honestly does to each quantity, read off the original itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from .compare import Tolerance, deviation, scale_of
from .reference import Reference
from .translation import Quantities, is_gradient

__all__ = ["Measured", "Yardstick"]

_EXACT = {
    torch.float64: Tolerance(1e-10, 2e-13),
    torch.float32: Tolerance(2e-5, 2e-5),
}
"""What exact runs may differ by, relative to the element and to the tensor's scale."""

_SAFETY = 64.0
"""Rounding in another order is allowed this multiple of the rounding error that the original shows."""

_NATIVE_FACTOR = 4.0
_NATIVE_UNITS = 8.0
"""In its own types a rewrite may err 4 times as much as the original, plus 8 units in the last place of the scale."""

_NOISE = 0.5
"""A tensor of which the original, in its own types, gets half the scale wrong has no scale of its own."""

_SMALL = 64
"""A tensor with fewer elements may come out right by luck: its own error is then read off the other tensors too."""


@dataclass(frozen=True)
class Measured:
    """One sample of the original under the new names.

    Attributes:
        exact: what the exact run yielded.
        native: what the run in the module's own types yielded, if there was one.
        echo: what the exact run yielded with the last bits of its inputs changed, if that was needed.
        probes: what it yielded with rounding-sized noise, if floats decide something.
    """

    exact: Quantities
    native: Quantities | None
    echo: Quantities | None
    probes: Sequence[Quantities]


class Yardstick:
    """Turn the original's own errors into tolerances.

    Args:
        reference: the original.
        measured: its samples.
        is_rounded: whether the rewritten module holds new tensors, which were computed in its own types: then its exact
            runs cannot be better than that.
    """

    def __init__(self, reference: Reference, measured: Sequence[Measured], *, is_rounded: bool) -> None:
        self.reference, self.is_rounded = reference, is_rounded
        self.wide_epsilon = reference.native_epsilon
        if reference.wide is not None:
            self.wide_epsilon = torch.finfo(reference.wide).eps
        self._rounding: dict[str, float] = {}
        self._own: dict[str, float] = {}
        for sample in measured:
            self._learn(sample)

    def _learn(self, sample: Measured) -> None:
        """Note how far rounding moves each tensor: in exact runs absolutely, in native ones relative to its scale."""
        shrink = self.wide_epsilon / self.reference.native_epsilon
        for label, (scale, _) in _scales(sample.exact).items():
            expected = sample.exact[label]
            native, echo = (_moved(expected, run, label) for run in (sample.native, sample.echo))
            exact = max(native * shrink, echo)
            own = max(native, echo, *(_moved(expected, probe, label) for probe in sample.probes), 0.0)
            self._rounding[label] = max(exact, self._rounding.get(label, 0.0))
            self._own[label] = max(own / scale if scale else 0.0, self._own.get(label, 0.0))

    def for_meaning(self, sample: Measured, wide: torch.dtype | None) -> dict[str, Tolerance]:
        """Return, for each tensor of a sample, what an exact run of the rewritten module may differ by."""
        if self.is_rounded:
            return self.for_precision(sample, None)
        units = 4 * self.reference.native_epsilon
        base = Tolerance(units, units) if wide is None else _EXACT[wide]
        return {
            label: Tolerance(
                base.relative,
                base.absolute * scale + _SAFETY * self._rounding.get(label, 0.0) + self.wide_epsilon * around,
                self._unit(label, scale, around),
            )
            for label, (scale, around) in _scales(sample.exact).items()
        }

    def for_precision(self, sample: Measured, budget: float | None) -> dict[str, Tolerance]:
        """Return, for each tensor of a sample, what the rewritten module may err by in its own types.

        A `budget` replaces what the original's own errors say; it is relative to the scale.
        """
        return {
            label: Tolerance(
                0.0,
                (self._share(sample, label) if budget is None else budget) * max(scale, 1e-6 * around),
                self._unit(label, scale, around),
            )
            for label, (scale, around) in _scales(sample.exact).items()
        }

    def _unit(self, label: str, scale: float, around: float) -> float:
        """Return what errors are reported relative to: for what is mere rounding noise, its neighbours' scale."""
        is_noise = self._own.get(label, 0.0) > _NOISE
        return around if is_noise else max(scale, 1e-12 * around)

    def _share(self, sample: Measured, label: str) -> float:
        """Return what part of its scale a tensor may be off by."""
        own = self._own.get(label, 0.0)
        if sample.exact[label].numel() < _SMALL:
            own = max(own, _typical(self._own.values()))
        return _NATIVE_FACTOR * own + _NATIVE_UNITS * self._epsilon(sample, label)

    def fragile(self, sample: Measured, label: str) -> int:
        """Return how many elements of an integer tensor rounding changes."""
        expected = sample.exact[label]
        changed = torch.zeros(expected.shape, dtype=torch.bool, device=expected.device)
        for other in (sample.native, *sample.probes):
            found = (other or {}).get(label)
            if isinstance(found, Tensor) and found.shape == expected.shape:
                changed |= found != expected
        return int(changed.sum())

    def _epsilon(self, sample: Measured, label: str) -> float:
        native = (sample.native or {}).get(label)
        if not isinstance(native, Tensor) or native.dtype is torch.float64 or not native.is_floating_point():
            return self.reference.native_epsilon
        return torch.finfo(native.dtype).eps


def _moved(expected: Tensor, run: Quantities | None, label: str) -> float:
    found = None if run is None else run.get(label)
    return deviation(expected, found) if isinstance(found, Tensor) else 0.0


def _scales(exact: Quantities) -> dict[str, tuple[float, float]]:
    """Return each float tensor's scale, and the largest scale among its kind (gradients, or everything else)."""
    own = {label: scale_of(value) for label, value in exact.items() if isinstance(value, Tensor) and _is_float(value)}
    around = {False: 0.0, True: 0.0}
    for label, scale in own.items():
        around[is_gradient(label)] = max(around[is_gradient(label)], scale)
    return {label: (scale, around[is_gradient(label)]) for label, scale in own.items()}


def _typical(errors: Iterable[float]) -> float:
    known = [error for error in errors if error > 0]
    return median(known) if known else 0.0


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex

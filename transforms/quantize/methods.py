"""How the numbers of a weight are found: by rounding alone, or with what calibration data say of a layer's inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed

from ...errors import MatchFailure, UsageError
from ...layers.quantized import quantized_by_rows
from ...runtime.state import dequantized, numbers_in, powers_of, quantized, text_of_numbers
from .gptq import gptq
from .options import Options
from .statistics import InputStatistics

__all__ = ["Treatment", "check_processes", "shift_of", "treatment"]

_STEPS = 20
"""Of the search of AWQ, as in its paper's code."""
_ALPHAS = tuple(number / 20 for number in range(6, 20))
"""Those that are tried where none is given."""
_MOST = 12
"""The largest exponent."""
_ROOM = 4
"""Inputs may be so many times as large as those that were seen, in float16."""


@dataclass(frozen=True)
class Treatment:
    """What was found for a layer: powers of two for its inputs, a shift of its bias, another weight to round."""

    exponents: str = ""
    shift: str = ""
    weight: Tensor | None = None

    @property
    def data(self) -> dict[str, Any]:
        """Return what plans keep: all but another weight, which is as large as the model."""
        kept = {"exponents": self.exponents, "shift": self.shift, "by_data": self.weight is not None}
        return {name: value for name, value in kept.items() if value}

    @classmethod
    def from_plan(
        cls, data: Mapping[str, Any], form: str, group: int, weight: Tensor, made: Tensor | None
    ) -> Treatment:
        """Return the same for a weight [outputs, inputs], or raise MatchFailure; `made`: the other weight, if known.
        A weight from an archive, or of a model that was restored, is rounded already.
        """
        if data.get("by_data") and made is None:
            rounded = dequantized(*quantized(weight.detach(), form, group), form, weight.dtype)
            if not torch.equal(rounded, weight):
                raise MatchFailure(_NEEDS_DATA)
            made = rounded
        return cls(str(data.get("exponents", "")), str(data.get("shift", "")), made)


_ONE_PROCESS = (
    "pass 'quantize': method=gptq makes numbers that no plan holds, and ranks share a plan; optimize in one process, "
    "fxopt.save, and fxopt.load the archive on each rank"
)

_NEEDS_DATA = (
    "its numbers were made from calibration data (method=gptq), and a plan does not hold them: load the archive, or "
    "optimize again with calibration="
)


def check_processes(options: Options) -> None:
    """Raise a UsageError where a method makes numbers that other processes would not have."""
    is_shared = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if is_shared and options.method == "gptq":
        raise UsageError(_ONE_PROCESS)


def treatment(options: Options, form: str, weight: Tensor, seen: InputStatistics) -> Treatment:
    """Return what is best for a weight, [outputs, inputs], on the inputs seen: rounding alone unless that errs more."""
    weight = weight.detach().cpu()
    if options.scheme == "int8_static":
        return _with_range(options, form, weight, seen)
    trial = _OnRows(form, options.group, weight, seen.rows, options.scheme)
    found = min(_candidates(options, form, weight, seen), key=trial.error)
    if not options.bias_correction:
        return found
    off = trial.weight.float() - trial.rounded(found).float()
    return Treatment(found.exponents, text_of_numbers((off @ seen.mean).bfloat16()), found.weight)


def _candidates(options: Options, form: str, weight: Tensor, seen: InputStatistics) -> Iterator[Treatment]:
    yield Treatment()
    match options.method:
        case "smoothquant":
            alphas = _ALPHAS if options.alpha is None else (options.alpha,)
            yield from map(Treatment, dict.fromkeys(_smoothed(weight, seen, alpha) for alpha in alphas))
        case "awq":
            scales = (seen.absolute / seen.count).pow
            yield from map(Treatment, dict.fromkeys(_powers(scales(step / _STEPS)) for step in range(1, _STEPS)))
        case "gptq" if seen.moments is not None:
            found = gptq(weight, seen.moments, form, options.group, damp=options.damp, by_size=options.act_order)
            if found is not None:
                yield Treatment(weight=found)
        case _:
            pass


def _smoothed(weight: Tensor, seen: InputStatistics, alpha: float) -> str:
    """Return the scales of Xiao et al., "SmoothQuant" (ICML 2023, arXiv:2211.10438), equation 4, as powers of two."""
    of_weight = weight.float().abs().amax(0)
    scales = seen.largest.pow(alpha) / of_weight.pow(1 - alpha)
    return _powers(torch.where((seen.largest > 0) & (of_weight > 0), scales, torch.nan))


def _powers(scales: Tensor) -> str:
    """Return the nearest powers of two, around their median, as text; 1 where a scale is no positive number."""
    logarithms = scales.log2()
    known = logarithms.isfinite()
    middle = logarithms[known].median() if known.any() else torch.zeros(())
    exponents = torch.where(known, logarithms - middle, 0.0).round().clamp(-_MOST, _MOST)
    return text_of_numbers(exponents.to(torch.int8)) if exponents.any() else ""


def _with_range(options: Options, form: str, weight: Tensor, seen: InputStatistics) -> Treatment:
    """Return what is best where one range is for all inputs: scales and a range that half of the rows give are tried on
    the others. What evens out inputs too well leaves no room for larger ones.
    """
    known, new = seen.rows[::2], seen.rows[1::2] if len(seen.rows) > 1 else seen.rows
    half = InputStatistics(len(known))
    half.see("", known)
    trial = _OnRows(form, options.group, weight, new, options.scheme, known)
    if options.method != "smoothquant":
        return min(_candidates(options, form, weight, seen), key=trial.error)
    alphas = _ALPHAS if options.alpha is None else (options.alpha,)
    errors = {alpha: trial.error(Treatment(_smoothed(weight, half, alpha))) for alpha in alphas}
    best = min(errors, key=errors.__getitem__)
    return Treatment(_smoothed(weight, seen, best)) if errors[best] < trial.error(Treatment()) else Treatment()


def _in_range_of(known: Tensor, rows: Tensor) -> Tensor:
    """Return rows rounded to 8 bits, and cut off, in the range of others."""
    low, high = known.amin().clamp(max=0), known.amax().clamp(min=0)
    step = (high - low).clamp(min=torch.finfo(rows.dtype).tiny) / 255
    return ((rows / step).round() * step).clamp(low, high)


@dataclass(frozen=True)
class _OnRows:
    """A weight and rows of its inputs, on which treatments are compared."""

    form: str
    group: int
    weight: Tensor
    rows: Tensor
    scheme: str
    known: Tensor = field(default_factory=lambda: torch.zeros(1))  # rows that the range of static inputs is found on

    def rounded(self, found: Treatment) -> Tensor:
        """Return the weight that a layer with a treatment stands for."""
        weight = self.weight if found.weight is None else found.weight
        factors = self._factors(found).to(weight.dtype)
        held = quantized(weight * factors, self.form, self.group)
        return dequantized(*held, self.form, weight.dtype) / factors

    def error(self, found: Treatment) -> float:
        """Return the mean square of what the layer's results are off; infinity where scaled inputs leave their type."""
        factors = self._factors(found)
        scaled = self.rows / factors
        if float(scaled.abs().max()) * _ROOM > torch.finfo(self.weight.dtype).max:
            return math.inf
        if self.scheme == "int8_dynamic":
            scaled = quantized_by_rows(scaled)
        elif self.scheme == "int8_static":
            scaled = _in_range_of(self.known / factors, scaled)
        rows = scaled * factors
        off = rows @ self.rounded(found).float().T - self.rows @ self.weight.float().T
        return float(off.square().mean())

    def _factors(self, found: Treatment) -> Tensor:
        return powers_of(found.exponents, self.weight.shape[1]) if found.exponents else torch.ones(())


def shift_of(text: str, count: int) -> Tensor:
    """Return the shift of a bias, float32 [count], from the text in a plan, or raise a StateError."""
    return numbers_in(text, count, torch.bfloat16, "shifts of a bias").float()

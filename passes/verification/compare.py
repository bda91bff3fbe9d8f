"""How far two tensors are apart, judged by the first one's scale and by the noise that honest rounding makes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .tolerances import NATIVE_UNITS, NOTHING, STANDS_FOR_INFINITY, Tolerance

__all__ = [
    "Distance", "bitwise_difference", "deviation", "distance", "drift", "form_difference", "half_the_digits",
    "rounding", "scale_of",
]  # fmt: skip


@dataclass(frozen=True)
class Distance:
    """How far apart two values are."""

    error: float  # the largest difference, relative to the scale of the expected tensor
    reason: str = ""  # a clause that says what is wrong ("differs: 3.1e-02 relative to its scale at [0, 5]"), or ""


_SAME = Distance(0.0)


def form_difference(expected: Any, actual: Any) -> str:
    """Return what differs in the type, shape, dtype or device of two leaves, as a clause, or ""."""
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        same = type(expected) is type(actual)
        return "" if same else f"changed from {type(expected).__name__} to {type(actual).__name__}"
    for what in ("shape", "dtype", "device", "layout"):
        old, new = getattr(expected, what), getattr(actual, what)
        if old != new:
            return f"changed its {what} from {_plain(old)} to {_plain(new)}"
    return ""


def _plain(value: object) -> str:
    return str(list(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")


def bitwise_difference(expected: Any, actual: Any) -> str:
    """Return where two leaves of one form differ in any bit that counts (NaN equals NaN), as a clause, or ""."""
    if not isinstance(expected, Tensor):
        return "" if expected == actual or (expected != expected and actual != actual) else "differs"
    old, new = _comparable(expected), _comparable(actual)
    wrong = (old != new) & ~((old != old) & (new != new))
    return f"is not bitwise the same at {_first(wrong)}" if wrong.any() else ""


def scale_of(tensor: Tensor) -> float:
    """Return the largest magnitude in `tensor`, leaving out what is not finite or stands for infinity."""
    plain = tensor if _is_plain(tensor) else _comparable(tensor).abs()
    largest = _largest_magnitude(plain)
    if largest < STANDS_FOR_INFINITY:
        return largest
    size = plain.double().abs()
    return _largest(torch.where(size < STANDS_FOR_INFINITY, size, 0.0))


def rounding(expected: Tensor) -> Tolerance:
    """Return what the last places of a tensor's scale allow, in its own type; integers and booleans nothing."""
    if not expected.is_floating_point() and not expected.is_complex():
        return NOTHING
    return Tolerance(0.0, NATIVE_UNITS * torch.finfo(expected.dtype).eps * scale_of(expected))


def half_the_digits(expected: Tensor) -> Tolerance:
    """Return what may differ where the same function sums in other parts, in the same dtype: integers in nothing."""
    if not expected.is_floating_point() and not expected.is_complex():
        return NOTHING
    return Tolerance(0.0, scale_of(expected) * torch.finfo(expected.dtype).eps ** 0.5)


def deviation(expected: Tensor, actual: Tensor) -> float:
    """Return the largest absolute difference where both are finite."""
    if expected.shape != actual.shape or _identical(expected, actual):
        return 0.0
    gap = (_comparable(actual) - _comparable(expected)).abs()
    largest = _largest(gap)
    return largest if math.isfinite(largest) else _largest(torch.nan_to_num(gap, nan=0.0, posinf=0.0, neginf=0.0))


def drift(expected: Tensor, actual: Tensor) -> tuple[float, float]:
    """Return by what part `actual` is larger than `expected` on the whole, and how much noise is left besides, both
    relative to the root of the mean square of what is finite.
    """
    old, new = _comparable(expected).flatten(), _comparable(actual).flatten()
    known = old.isfinite() & new.isfinite() & (old.abs() < STANDS_FOR_INFINITY)
    old, new = old[known], new[known]
    power = float(old.square().sum())
    if not power:
        return 0.0, 0.0
    share = float((new - old) @ old) / power
    return share, math.sqrt(float((new - old * (1 + share)).square().sum()) / power)


def distance(expected: Any, actual: Any, tolerance: Tolerance, *, fewer_infinities: bool = False) -> Distance:
    """Compare two leaves of one shape: floats within a tolerance, all else must be equal. With `fewer_infinities`,
    finite values pass where those expected are not: an overflow that the rewrite avoids.
    """
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return _distance_of_values(expected, actual, tolerance)
    if _identical(expected, actual):
        return _SAME
    if _is_plain(expected) and _is_plain(actual) and expected.dtype is actual.dtype is not torch.bfloat16:
        # A difference is rounded to the units of its own size; in bfloat16, which has eight bits, that is too coarse.
        near = _near(_largest_magnitude(actual - expected), expected, tolerance)
        if near is not None:
            return near
    old, new = _comparable(expected), _comparable(actual)
    if not old.is_floating_point() and not old.is_complex():
        return _distance_of_integers(old, new, tolerance)
    return _distance_of_floats(old, new, tolerance, fewer_infinities)


def _near(largest: float, expected: Tensor, tolerance: Tolerance) -> Distance | None:
    """Return how far apart two tensors are, where all is finite and within tolerance: the usual case, in two passes."""
    if not (largest <= tolerance.absolute and math.isfinite(largest)):
        return None
    return Distance(largest / _unit(expected, tolerance))


def _unit(expected: Tensor, tolerance: Tolerance) -> float:
    """Return what an error is reported relative to."""
    return max(scale_of(expected), tolerance.smallest_scale, torch.finfo(torch.float64).tiny)


def _distance_of_values(expected: Any, actual: Any, tolerance: Tolerance) -> Distance:
    if isinstance(expected, (float, complex)) and isinstance(actual, (float, complex)):
        kind = torch.complex128 if isinstance(expected, complex) else torch.float64
        return distance(torch.tensor(expected, dtype=kind), torch.tensor(actual, dtype=kind), tolerance)
    same = expected is actual or bool(expected == actual)
    return _SAME if same else Distance(math.inf, f"changed from {expected!r} to {actual!r}")


def _distance_of_integers(expected: Tensor, actual: Tensor, tolerance: Tolerance) -> Distance:
    wrong = expected != actual
    count = int(wrong.sum())
    if count <= tolerance.places:
        return _SAME
    return Distance(math.inf, f"differs at {list(_first(wrong))}, in {count} of {wrong.numel()} elements")


def _distance_of_floats(expected: Tensor, actual: Tensor, tolerance: Tolerance, fewer_infinities: bool) -> Distance:
    largest = _largest((actual - expected).abs_()) if expected.is_floating_point() else math.inf
    if (near := _near(largest, expected, tolerance)) is not None:
        return near
    equal = (expected == actual) | ((expected != expected) & (actual != actual))
    old_is_finite = torch.isfinite(expected)
    odd = ~equal & (~torch.isfinite(actual) | (~old_is_finite if not fewer_infinities else False))
    if odd.any():
        at = _first(odd)
        return Distance(math.inf, f"is {actual[at].item()} where it was {expected[at].item()}, at {list(at)}")
    gap = torch.where(equal | ~old_is_finite, 0.0, actual - expected).abs()
    size = torch.where(old_is_finite, expected, 0.0).abs()
    error = _largest(gap) / _unit(size, tolerance)
    excess = gap - (tolerance.relative * size + tolerance.absolute)
    if not (excess > 0).any():
        return Distance(error)
    at = list(_first(excess == excess.max()))  # torch.unravel_index imports for a quarter of a second when first called
    return Distance(error, f"differs: {error:.1e} relative to its scale at {at}")


def _identical(expected: Tensor, actual: Tensor) -> bool:
    if expected is actual:
        return True
    is_comparable = _is_ordinary(expected) and _is_ordinary(actual) and expected.dtype == actual.dtype
    return is_comparable and torch.equal(expected, actual)


def _is_ordinary(tensor: Tensor) -> bool:
    """Say whether a tensor holds its own numbers: other classes, of quantized weights say, compute little with them."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _comparable(tensor: Tensor) -> Tensor:
    has_own = type(tensor).dequantize is not Tensor.dequantize  # a tensor of another class, which holds other numbers
    known = tensor.dequantize() if has_own else tensor
    dense = known.to_dense() if known.layout is not torch.strided else known
    if dense.is_complex():
        return dense.to(torch.complex128)
    return dense.double() if dense.is_floating_point() else dense


def _is_plain(tensor: Tensor) -> bool:
    return _is_ordinary(tensor) and tensor.dtype in (torch.float64, torch.float32, torch.bfloat16)


def _largest_magnitude(tensor: Tensor) -> float:
    """Return the largest magnitude in one pass over a tensor of floats; NaN where one is in it."""
    if not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor)
    return max(-float(low), float(high))


def _largest(tensor: Tensor) -> float:
    return float(tensor.max()) if tensor.numel() else 0.0


def _first(wrong: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in wrong.nonzero()[0])

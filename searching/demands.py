"""What a user asks a search for: objective, constraints and a time, read from words, with what is wrong in them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from ..errors import UsageError, did_you_mean
from ..passes.timing import SECONDS
from ..reporting.wording import duration
from ..storage import byte_text, parse_bytes

__all__ = [
    "OBJECTIVES", "QUANTITIES", "Bound", "Demands", "Quantity", "parse_bounds", "parse_objective", "parse_seconds",
]  # fmt: skip

_BOUND = re.compile(r"\s*(?P<sign><=|>=|=<|=>|<|>)?\s*(?P<number>[+-]?\d*\.?\d+(?:[eE][+-]?\d+)?)\s*(?P<unit>\S*)\s*")


@dataclass(frozen=True)
class Quantity:
    """A figure of a point: whether larger is better, how it is written, how a number with a unit is read."""

    name: str
    written: Callable[[float], str]
    read: Callable[[float, str], float | None]
    example: str
    higher: bool = False

    def cost(self, value: float) -> float:
        """Return it as a number of which less is better, and ratios mean the same."""
        return 1.0 / max(value, 1e-300) if self.higher else value


def _seconds(number: float, unit: str) -> float | None:
    return number * SECONDS[unit] if unit in SECONDS else None


def _bytes(number: float, unit: str) -> float | None:
    size = parse_bytes(f"1 {unit or 'b'}")
    return None if size is None else number * size


def _share(number: float, unit: str) -> float | None:
    return number / 100.0 if unit == "%" else None if unit else number


def _plain(number: float, unit: str) -> float | None:
    return None if unit else number


def _rate(number: float, unit: str) -> float | None:
    return number if unit in ("", "/s") else None


QUANTITIES: Mapping[str, Quantity] = {
    each.name: each
    for each in (
        Quantity("latency", duration, _seconds, "20 ms"),
        Quantity("throughput", lambda value: f"{value:.4g}/s", _rate, "1000/s", higher=True),
        Quantity("training_step", duration, _seconds, "20 ms"),
        Quantity("memory", byte_text, _bytes, "500 MB"),
        Quantity("size", byte_text, _bytes, "20 MB"),
        Quantity("error", lambda value: f"{value:.2g}", _share, "0.02"),
        Quantity("metric", lambda value: f"{value:.4g}", _plain, "0.98", higher=True),
    )
}
OBJECTIVES = ("latency", "memory", "size", "throughput", "training_step")
_STEP = "training_step"
_OF_INFERENCE, _OF_TRAINING = ("latency", "throughput"), (_STEP,)


@dataclass(frozen=True)
class Bound:
    """What one figure of a point may be at most or, where more is better, at least."""

    name: str
    number: float
    is_share: bool  # of the original's, as a change
    text: str
    higher: bool

    def limit(self, original: Mapping[str, float]) -> float:
        """Return the number that the figure may not pass."""
        if not self.is_share:
            return self.number
        return original[self.name] + self.number * abs(original[self.name])

    def lack(self, figures: Mapping[str, float], original: Mapping[str, float]) -> float:
        """Return how far a figure is from where it may be, relative to that; 0 where it is met, infinity if unknown."""
        found, limit = figures.get(self.name, math.nan), self.limit(original)
        beyond = limit - found if self.higher else found - limit
        if math.isnan(beyond):
            return math.inf
        return max(0.0, beyond) / max(abs(limit), 1e-12) if beyond > 1e-12 * abs(limit) else 0.0

    def said(self, figures: Mapping[str, float], original: Mapping[str, float]) -> str:
        """Say what a point lacks: the figure, and what it should be."""
        written = QUANTITIES[self.name].written
        found = written(figures[self.name]) if self.name in figures else "not measured"
        return f"{self.name} {found}, wanted {'>=' if self.higher else '<='} {written(self.limit(original))}"


@dataclass(frozen=True)
class Demands:
    """What a search is asked for: the objective, what bounds it, and the seconds that there are."""

    objective: str
    bounds: tuple[Bound, ...]
    seconds: float

    @classmethod
    def read(
        cls, objective: object, constraints: object, time_budget: object, *, minimize: bool, has_metric: bool
    ) -> Demands:
        """Read what a user gave; UsageError says what is wrong in it."""
        if minimize and not has_metric:
            raise UsageError("minimize says that less of what evaluate returns is better: give evaluate, or leave it")
        wanted = parse_objective(objective)
        bounds = parse_bounds(constraints, training=wanted == _STEP, minimize=minimize, has_metric=has_metric)
        return cls(wanted, bounds, parse_seconds(time_budget))

    @property
    def training(self) -> bool:
        """Say whether steps of training are searched."""
        return self.objective == _STEP


def parse_objective(objective: object) -> str:
    """Return the name of an objective, or raise UsageError."""
    if objective not in OBJECTIVES:
        hint = did_you_mean(objective, OBJECTIVES) if isinstance(objective, str) else f"; give {', '.join(OBJECTIVES)}"
        raise UsageError(f"objective={objective!r}{hint}")
    return str(objective)


def parse_bounds(given: object, *, training: bool, minimize: bool, has_metric: bool) -> tuple[Bound, ...]:
    """Return constraints, given as name -> what the figure may be; UsageError for what no point can mean to meet.

    Without a metric of the user, `metric` is the error: "-1%" of it is an error of 0.01 at most.
    """
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise UsageError(f"constraints is of type {kind}; give a dictionary, such as {{'metric': '-1%'}}")
    bounds: list[Bound] = []
    for name, value in cast("Mapping[object, object]", given).items():
        known = [each for each in QUANTITIES if each not in (_OF_INFERENCE if training else _OF_TRAINING)]
        if name not in known:
            hint = did_you_mean(name, known) if isinstance(name, str) else f"; there are {', '.join(known)}"
            phase = "training" if training else "inference"
            raise UsageError(f"constraints: {name!r} is no figure of {phase}{hint}")
        bound = _bound(str(name), value, minimize=minimize)
        bounds.append(bound if has_metric or name != "metric" else _of_error(bound))
    return tuple(bounds)


def _bound(name: str, given: object, *, minimize: bool) -> Bound:
    """Read one constraint: a number, or a text with a sign and a unit."""
    quantity = QUANTITIES[name]
    higher = quantity.higher and not (name == "metric" and minimize)
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    parts = _BOUND.fullmatch(str(given)) if isinstance(given, str) or is_number else None
    if parts is None:
        raise _wrong(name, given, f"give a number with its unit, such as {quantity.example!r} or '-10%'")
    sign, number, unit = parts["sign"] or "", float(parts["number"]), parts["unit"]
    if sign and (">" in sign) != higher:
        way = "higher is better, so give a lower bound: >=" if higher else "lower is better, so give an upper bound: <="
        raise _wrong(name, given, way)
    if unit == "%" and name != "error":
        if parts["number"][0] not in "+-":
            raise _wrong(name, given, "say from where: '-10%' is a tenth less than the original has")
        if number <= -100 and not quantity.higher:
            raise _wrong(name, given, "no model can have that; give something like '-10%'")
        return Bound(name, number / 100.0, True, str(given), higher)
    value = quantity.read(number, unit)
    if value is None or not math.isfinite(value):
        raise _wrong(name, given, f"give a number with its unit, such as {quantity.example!r} or '-10%'")
    if name != "metric" and (value < 0 or (value == 0 and name != "error")):
        raise _wrong(name, given, f"no model can have that; give something like {quantity.example!r}")
    return Bound(name, value, False, str(given), higher)


def _of_error(bound: Bound) -> Bound:
    """Return what a bound of the metric says of the error, which stands for it."""
    number = -bound.number if bound.is_share else bound.number
    if number < 0 or not bound.is_share:
        raise _wrong(
            "metric", bound.text, "without evaluate the metric is the error of the results: give {'error': 0.01}, or "
            "{'metric': '-1%'}, which is the same, or evaluate",
        )  # fmt: skip
    return Bound("error", number, False, bound.text, higher=False)


def _wrong(name: str, given: object, advice: str) -> UsageError:
    return UsageError(f"constraints: {name}={given!r}; {advice}")


def parse_seconds(given: object, name: str = "time_budget") -> float:
    """Return seconds, given as a number or with a unit ("10 min", "90 s"); UsageError for anything else."""
    number, unit = (given, "s") if isinstance(given, (int, float)) and not isinstance(given, bool) else (math.nan, "")
    if isinstance(given, str) and (parts := _BOUND.fullmatch(given)) and not parts["sign"]:
        number, unit = float(parts["number"]), parts["unit"] or "s"
    try:
        seconds = _seconds(float(number), unit)
    except OverflowError:
        seconds = None
    if seconds is None or not 0 < seconds < math.inf:
        raise UsageError(f"{name}={given!r}; give seconds, or a text such as '10 min'")
    return seconds

"""How a use is declared: a function of one side of a comparison that returns what came out, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.outcomes import Outcome
from support.samples import Subject


@dataclass(frozen=True)
class Use:
    """One way of using a model."""

    name: str
    run: Callable[[Subject], Outcome]
    writes: bool = False
    """It changes weights: a pass that sets weights to zero, or observes ranges, has another result by design then."""
    tolerance: float = 0.0
    """What the use itself loses, as a low precision does."""

    ranges: bool = False
    """Numbers inside the model leave the range of the examples: a pass that observes ranges cuts them off by design."""
    slow: bool = False
    """It takes a second or more: a run of all tests does it for few models."""

    @property
    def summary(self) -> str:
        return (self.run.__doc__ or "").strip().splitlines()[0]


def use(**options: Any) -> Callable[[Callable[[Subject], Outcome]], Use]:
    """Make a use of a function, under its own name."""
    return lambda function: Use(function.__name__, function, **options)

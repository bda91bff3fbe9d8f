"""One model, trained on several processes by hand and by a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Step", "Way"]

Step = Callable[[], object]
"""One training step of this process: forward, backward, optimizer."""


@dataclass(frozen=True)
class Way:
    """Two builds of the same model; both run in every process of an initialized gloo group, on one thread.

    Attributes:
        name: what the table calls it.
        by_hand: builds what one writes without fxopt.
        by_pass: builds the same by `fxopt.optimize`.
        processes: how many there are.
    """

    name: str
    by_hand: Callable[[], Step]
    by_pass: Callable[[], Step]
    processes: int = 2

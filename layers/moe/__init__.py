"""Mixtures of experts: routers, losses, and the ways to apply experts to the tokens that chose them."""

from __future__ import annotations

from .dispatch import choose_way, combine, mixture, possible_ways
from .ways import WAYS, Compute, Linear, Projection, Task, Way, loop_over_experts

__all__ = [
    "WAYS",
    "Compute",
    "Linear",
    "Projection",
    "Task",
    "Way",
    "choose_way",
    "combine",
    "loop_over_experts",
    "mixture",
    "possible_ways",
]

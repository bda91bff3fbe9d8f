"""Mixtures of experts: routers, losses, and the ways to apply experts to the tokens that chose them."""

from __future__ import annotations

from .dispatch import choose_way, combine, mixture, possible_ways
from .layer import MixtureOfExperts
from .losses import load_balancing_loss, router_z_loss
from .router import Router, RouterOutput
from .ways import WAYS, Compute, Linear, Projection, Task, Way, loop_over_experts

__all__ = [
    "WAYS",
    "Compute",
    "Linear",
    "MixtureOfExperts",
    "Projection",
    "Router",
    "RouterOutput",
    "Task",
    "Way",
    "choose_way",
    "combine",
    "load_balancing_loss",
    "loop_over_experts",
    "mixture",
    "possible_ways",
    "router_z_loss",
]

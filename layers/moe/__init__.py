"""Mixtures of experts: routers, losses, and the ways to apply experts to the tokens that chose them."""

from __future__ import annotations

from .dealt import ExpertPlacement
from .dispatch import choose_lowering, mixture, possible_lowerings
from .fused import FusedExperts, Routing, added_to, apply_linear
from .layer import MixtureOfExperts
from .lowerings import LOWERINGS, Compute, Linear, Lowering, Projection, Task, combine, loop_over_experts
from .router import Router, RouterOutput, load_balancing_loss, over_capacity, router_z_loss

__all__ = [
    "LOWERINGS", "Compute", "ExpertPlacement", "FusedExperts", "Linear", "Lowering", "MixtureOfExperts", "Projection",
    "Router", "RouterOutput", "Routing", "Task", "added_to", "apply_linear", "choose_lowering", "combine",
    "load_balancing_loss", "loop_over_experts", "mixture", "over_capacity", "possible_lowerings", "router_z_loss",
]  # fmt: skip

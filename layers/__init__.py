"""Modules and functions that passes put into models, or that users use directly."""

from __future__ import annotations

from .moe import MixtureOfExperts, RouterOutput, load_balancing_loss, router_z_loss

__all__ = ["MixtureOfExperts", "RouterOutput", "load_balancing_loss", "router_z_loss"]

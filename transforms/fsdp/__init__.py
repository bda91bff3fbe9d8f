"""Sharding over processes: the search for units, and FSDP2 around them."""

from __future__ import annotations

from .fsdp import Fsdp

__all__ = ["Fsdp"]

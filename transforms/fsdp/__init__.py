"""Sharding over processes: the search for units, and FSDP2 around them."""

from __future__ import annotations

from .sharding import Fsdp

__all__ = ["Fsdp"]

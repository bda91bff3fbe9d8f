"""Checkpoints of the original in several files, of which each process reads its part."""

from __future__ import annotations

from .loading import load_sharded

__all__ = ["load_sharded"]

"""Regions of graphs that an installed engine computes: the call that graphs hold, and the table of engines."""

from __future__ import annotations

from .conversion import sum_of
from .engine import Engine, Session
from .engines import engine_named, engines
from .refresh import refresh
from .region import DelegatedRegion

__all__ = ["DelegatedRegion", "Engine", "Session", "engine_named", "engines", "refresh", "sum_of"]

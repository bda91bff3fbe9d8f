"""Regions of graphs that an installed engine computes: the call that graphs hold, and the table of engines."""

from __future__ import annotations

from .conversion import as_converted, is_forked, sum_of
from .engine import Engine, OtherSizes, Session
from .engines import engine_named, engines
from .on_disk import fit_for_disk, move_to_disk
from .one_thread import LookUp
from .refresh import fix_regions, fixed_regions, held_bytes, refresh
from .region import DelegatedRegion, judged_outside

__all__ = [
    "DelegatedRegion", "Engine", "LookUp", "OtherSizes", "Session", "as_converted", "engine_named", "engines",
    "fit_for_disk", "fix_regions", "fixed_regions", "held_bytes", "is_forked", "judged_outside", "move_to_disk",
    "refresh", "sum_of",
]  # fmt: skip

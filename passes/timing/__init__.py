"""Interleaved timing of candidates."""

from __future__ import annotations

from .collection import collection_paused
from .measure import Interval, Timings, time_candidates
from .runner import Runner, runner

__all__ = ["Interval", "Runner", "Timings", "collection_paused", "runner", "time_candidates"]

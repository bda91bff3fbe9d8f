"""Interleaved timing of candidates, what all of it may take, and live bytes."""

from __future__ import annotations

from .budget import DEFAULT_BUDGET, SECONDS, BudgetRequest, OutOfTimeError, Stage, TimeBudget, budget_clock
from .conditions import last_level_bytes, one_thread, race_clock, seconds_of
from .held import held_memory
from .live_bytes import LiveBytes, MemoryUse, call_bytes, memory_use
from .measure import (
    CALLS_OF_CLEAR,
    CALLS_OF_EACH,
    CALLS_OF_TWO,
    Interval,
    Timings,
    in_threads_that_gain,
    time_candidates,
)
from .pairs import (
    kinds_within,
    microseconds,
    no_faster,
    no_gain,
    rough_ratio,
    time_kind,
    time_pair,
    timing_figures,
    within_left,
)
from .runner import Runner, forward_seconds

__all__ = [
    "CALLS_OF_CLEAR", "CALLS_OF_EACH", "CALLS_OF_TWO", "DEFAULT_BUDGET", "SECONDS", "BudgetRequest", "Interval",
    "LiveBytes", "MemoryUse", "OutOfTimeError", "Runner", "Stage", "TimeBudget", "Timings", "budget_clock",
    "call_bytes", "forward_seconds", "held_memory", "in_threads_that_gain", "kinds_within", "last_level_bytes",
    "memory_use", "microseconds", "no_faster", "no_gain", "one_thread", "race_clock", "rough_ratio", "seconds_of",
    "time_candidates", "time_kind", "time_pair", "timing_figures", "within_left",
]  # fmt: skip

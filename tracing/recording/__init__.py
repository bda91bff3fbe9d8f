"""Run a model and note its calls, compare what comes out, and count the calls that no graph fits."""

from __future__ import annotations

from .example_calls import recording
from .fallback import attach, detach, fallback_of, misses_in
from .generating import NO_STEP, calls_by_kind, calls_of_generate, generated_calls
from .output_check import disagreeing, expectations
from .record import Call, Computed, Recording, calls_intercepted, copy_inputs, record

__all__ = [
    "NO_STEP",
    "Call",
    "Computed",
    "Recording",
    "attach",
    "calls_by_kind",
    "calls_intercepted",
    "calls_of_generate",
    "copy_inputs",
    "detach",
    "disagreeing",
    "expectations",
    "fallback_of",
    "generated_calls",
    "misses_in",
    "record",
    "recording",
]

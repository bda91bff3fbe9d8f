"""Run a model and note its calls, and compare what comes out."""

from __future__ import annotations

from .example_calls import NO_STEP, calls_by_kind, calls_of_generate, generated_calls, recording
from .output_check import disagreeing, expectations
from .record import Call, Computed, Recording, calls_intercepted, copy_inputs, record

__all__ = [
    "NO_STEP", "Call", "Computed", "Recording", "calls_by_kind", "calls_intercepted", "calls_of_generate",
    "copy_inputs", "disagreeing", "expectations", "generated_calls", "record", "recording",
]  # fmt: skip

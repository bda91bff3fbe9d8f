"""Find the ranges of activations, by running a model on data: what `quantize` and `qat` calibrate with."""

from __future__ import annotations

from .batches import calls, replayable, run_call
from .ranges import ranges_of

__all__ = ["calls", "ranges_of", "replayable", "run_call"]

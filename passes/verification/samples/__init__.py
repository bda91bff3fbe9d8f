"""What a module is run on: single calls, and what users do with it besides calling it."""

from __future__ import annotations

from .samples import Data, Sample, Sizes
from .uses import Use, Used, run_in_use, taken_uses

__all__ = ["Data", "Sample", "Sizes", "Use", "Used", "run_in_use", "taken_uses"]

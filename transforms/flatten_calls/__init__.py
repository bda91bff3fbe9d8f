"""Write the calls of a module tree out as one function: the pass, what it opens, what it asks at each call."""

from __future__ import annotations

from .flatten_calls import FlattenCalls
from .write import Flat, flattened, is_written_out

__all__ = ["Flat", "FlattenCalls", "flattened", "is_written_out"]

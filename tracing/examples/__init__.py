"""What a capture takes: example inputs; and why it cannot trace a forward."""

from __future__ import annotations

from .inputs import Generating, Inputs, call_of_batch, check_whole, is_input, normalize_inputs
from .untraceable import Untraceable

__all__ = [
    "Generating", "Inputs", "Untraceable", "call_of_batch", "check_whole", "is_input", "normalize_inputs",
]  # fmt: skip

"""What a capture takes and knows of values: example inputs, what nodes give, what cannot be traced."""

from __future__ import annotations

from ...runtime.values import Meta, TensorMeta, meta_key, meta_of
from .inputs import Generating, Inputs, call_of_batch, check_whole, is_input, normalize_inputs
from .untraceable import Untraceable

__all__ = [
    "Generating", "Inputs", "Meta", "TensorMeta", "Untraceable", "call_of_batch", "check_whole", "is_input", "meta_key",
    "meta_of", "normalize_inputs",
]  # fmt: skip

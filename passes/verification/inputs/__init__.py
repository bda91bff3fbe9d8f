"""Make inputs and state to compare on: with noise, and calls derived from an example."""

from __future__ import annotations

from .derived import few_rows, many_rows, one_row, other_rows, other_strides, smaller, zeros
from .noise import jittered, perturbed_inputs, perturbed_state

__all__ = [
    "few_rows",
    "jittered",
    "many_rows",
    "one_row",
    "other_rows",
    "other_strides",
    "perturbed_inputs",
    "perturbed_state",
    "smaller",
    "zeros",
]

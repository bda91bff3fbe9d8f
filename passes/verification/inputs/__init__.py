"""Make inputs and state to compare on: with noise, and calls derived from an example."""

from __future__ import annotations

from .alike import alike, permuted
from .derived import (
    are_same,
    few_rows,
    larger,
    longer,
    many_rows,
    not_finite,
    one_row,
    other_rows,
    other_strides,
    smaller,
    zeros,
)
from .neighbours import Neighbour, neighbours
from .noise import jittered, perturbed_inputs, perturbed_state
from .served import Asked, ServedCall, served_calls
from .unlike import nothing, uneven

__all__ = [
    "Asked",
    "Neighbour",
    "ServedCall",
    "alike",
    "are_same",
    "few_rows",
    "jittered",
    "larger",
    "longer",
    "many_rows",
    "neighbours",
    "not_finite",
    "nothing",
    "one_row",
    "other_rows",
    "other_strides",
    "permuted",
    "perturbed_inputs",
    "perturbed_state",
    "served_calls",
    "smaller",
    "uneven",
    "zeros",
]

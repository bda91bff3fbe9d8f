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
from .modes import depends_on_mode, modes_to_check, picks_by_data
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
    "depends_on_mode",
    "few_rows",
    "jittered",
    "larger",
    "longer",
    "many_rows",
    "modes_to_check",
    "neighbours",
    "not_finite",
    "nothing",
    "one_row",
    "other_rows",
    "other_strides",
    "permuted",
    "perturbed_inputs",
    "perturbed_state",
    "picks_by_data",
    "served_calls",
    "smaller",
    "uneven",
    "zeros",
]

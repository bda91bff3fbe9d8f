"""Make inputs and state to compare on: with noise, and calls derived from an example."""

from __future__ import annotations

from .contents import alike, are_same, nothing, one_row, other_rows, other_strides, permuted, zeros
from .modes import depends_on_mode, modes_to_check, picks_by_data, shows_modes
from .neighbours import Neighbour, neighbours
from .noise import jittered, perturbed_inputs, perturbed_state
from .served import Asked, ServedCall, served_calls
from .sizes import few_rows, larger, many_rows, named_tensors, smaller, uneven, with_rows

__all__ = [
    "Asked", "Neighbour", "ServedCall", "alike", "are_same", "depends_on_mode", "few_rows", "jittered", "larger",
    "many_rows", "modes_to_check", "named_tensors", "neighbours", "nothing", "one_row", "other_rows", "other_strides",
    "permuted", "perturbed_inputs", "perturbed_state", "picks_by_data", "served_calls", "shows_modes", "smaller",
    "uneven", "with_rows", "zeros",
]  # fmt: skip

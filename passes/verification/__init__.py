"""Decide whether a rewritten module is what it was: reference, tolerances, judgement."""

from __future__ import annotations

from .allowances import gradients_within
from .compare import distance, form_difference, half_the_digits, rounding, scale_of
from .demands import OVER_BUDGET, Verdict
from .float64 import Float64Mode, double_defaults, narrow, widened
from .inputs import (
    Neighbour,
    depends_on_mode,
    jittered,
    modes_to_check,
    neighbours,
    perturbed_inputs,
    perturbed_state,
    shows_modes,
    smaller,
    with_rows,
)
from .reference import References, reference, worst
from .samples import Data, Reference, Sizes, no_peer
from .tape import Tape
from .tolerances import MEANING, NATIVE_FACTOR, Tolerance
from .translation import MapState
from .verify import NO_ELEMENTS, verify
from .whole_model import Original

__all__ = [
    "MEANING", "NATIVE_FACTOR", "NO_ELEMENTS", "OVER_BUDGET", "Data", "Float64Mode", "MapState", "Neighbour",
    "Original", "Reference", "References", "Sizes", "Tape", "Tolerance", "Verdict", "depends_on_mode", "distance",
    "double_defaults", "form_difference", "gradients_within", "half_the_digits", "jittered", "modes_to_check",
    "narrow", "neighbours", "no_peer", "perturbed_inputs", "perturbed_state", "reference", "rounding", "scale_of",
    "shows_modes", "smaller", "verify", "widened", "with_rows", "worst",
]  # fmt: skip

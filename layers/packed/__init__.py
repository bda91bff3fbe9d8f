"""Functions that rewritten graphs call: layers on weights in the form that kernels of this machine read."""

from __future__ import annotations

from .activations import NO_ACTIVATION, Activation, known_activations
from .convolution import Geometry, PackedConvolution
from .linear import PackedLinear, TransposedLinear
from .narrow import keep_narrow
from .recurrent import PackedLSTM, Recurrence
from .released import ReleasedWeight, refuse_checkpoints, release_weight
from .weights import BySettings, Packed, why_not_packed

__all__ = [
    "NO_ACTIVATION", "Activation", "BySettings", "Geometry", "Packed", "PackedConvolution", "PackedLSTM",
    "PackedLinear", "Recurrence", "ReleasedWeight", "TransposedLinear", "keep_narrow", "known_activations",
    "refuse_checkpoints", "release_weight", "why_not_packed",
]  # fmt: skip

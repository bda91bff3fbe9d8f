"""Functions that rewritten graphs call: layers on weights in the form that this machine's kernels read."""

from __future__ import annotations

from .activations import NO_ACTIVATION, Activation, known_activations
from .linear import PackedLinear

__all__ = ["NO_ACTIVATION", "Activation", "PackedLinear", "known_activations"]

"""`rms_norm` and `layer_norm` along the last dimension, each with the addition of a residual before it."""

from .layer_norm import add_layer_norm, layer_norm
from .rms_norm import add_rms_norm, rms_norm

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]

"""`rms_norm` and `layer_norm` along the last dimension, each with the addition of a residual before it."""

from .layer_norm import ROWS as LAYER_ROWS
from .layer_norm import add_layer_norm, layer_norm
from .rms_norm import ROWS as RMS_ROWS
from .rms_norm import add_rms_norm, rms_norm

__all__ = ["ROWS", "add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]

ROWS = (*LAYER_ROWS, *RMS_ROWS)

"""`bias_act`: bias, activation, dropout and residual in one pass over the data."""

from .definition import ROWS, bias_act

__all__ = ["ROWS", "bias_act"]

"""`bias_act`: bias, activation, dropout and residual in one pass over the data."""

from .definition import bias_act

__all__ = ["bias_act"]

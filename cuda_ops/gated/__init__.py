"""`swiglu` and `geglu`: an activated gate times a value."""

from .definition import geglu, swiglu

__all__ = ["geglu", "swiglu"]

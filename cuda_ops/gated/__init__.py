"""`swiglu` and `geglu`: an activated gate times a value."""

from .definition import ROWS, geglu, swiglu

__all__ = ["ROWS", "geglu", "swiglu"]

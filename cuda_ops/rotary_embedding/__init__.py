"""`rotary_embedding`: positions as rotations of pairs of features."""

from .definition import ROWS, rotary_embedding

__all__ = ["ROWS", "rotary_embedding"]

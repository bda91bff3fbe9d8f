"""`rotary_embedding`: positions as rotations of pairs of features."""

from .definition import rotary_embedding

__all__ = ["rotary_embedding"]

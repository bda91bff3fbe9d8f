"""`linear_cross_entropy`: the loss of a linear head, a chunk of rows at a time, so that logits are never held whole."""

from .definition import linear_cross_entropy

__all__ = ["linear_cross_entropy"]

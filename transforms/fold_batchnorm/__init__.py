"""Fold batch norms into the convolutions and linears before them: the pass, what it finds, what it computes."""

from __future__ import annotations

from .fold import FoldBatchnorm

__all__ = ["FoldBatchnorm"]

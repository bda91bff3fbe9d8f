"""Fold batch norms into the convolutions and linears beside them: the pass, what it finds, what it computes."""

from __future__ import annotations

from .find import pairs_in, source_of
from .fold_batchnorm import FoldBatchnorm
from .obstacles import obstacles
from .write import write_check

__all__ = ["FoldBatchnorm", "obstacles", "pairs_in", "source_of", "write_check"]

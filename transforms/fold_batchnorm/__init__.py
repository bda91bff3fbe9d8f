"""Fold batch norms into the convolutions and linears beside them: the pass, what it finds, what it computes."""

from __future__ import annotations

from .find import pairs_in, source_of
from .fold_batchnorm import FoldBatchnorm
from .reasons import reasons_against
from .write import write_check

__all__ = ["FoldBatchnorm", "pairs_in", "reasons_against", "source_of", "write_check"]

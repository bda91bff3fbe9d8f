"""What each operator of torch does with the dimensions of its operands: one rule each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .contraction import CONTRACTIONS
from .convolution import CONVOLUTIONS
from .elementwise import ELEMENTWISE, results_of
from .indexing import INDEXING
from .recurrent import WHOLE
from .reduction import REDUCTIONS
from .shapes import SHAPES

__all__ = ["RULES", "WHOLE", "results_of"]

RULES: Mapping[str, Callable[..., Any]] = {
    **ELEMENTWISE,
    **SHAPES,
    **CONTRACTIONS,
    **CONVOLUTIONS,
    **REDUCTIONS,
    **INDEXING,
}
"""Name of an operator -> a function of the tracker, its arguments and its result, which gives the result's labels."""

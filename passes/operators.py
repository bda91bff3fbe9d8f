"""Names of operators by what is known of them, for the passes that still ask for whole sets."""

from __future__ import annotations

from ..operators import (
    canonical_name,
    function_of,
    function_path,
    in_place_signature,
    mutates,
    operator_of_module,
    resolve,
)
from ..operators.table import TABLE

__all__ = [
    "KEEP_RANK",
    "POINTWISE",
    "VECTORIZABLE",
    "canonical_name",
    "function_of",
    "function_path",
    "in_place_signature",
    "mutates",
    "operator_of_module",
    "resolve",
]

POINTWISE = frozenset(info.name for info in TABLE if info.elementwise)
VECTORIZABLE = frozenset(info.name for info in TABLE if info.vectorizable)
KEEP_RANK = frozenset(info.name for info in TABLE if info.keeps_rank)

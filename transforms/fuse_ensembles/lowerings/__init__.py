"""Write ensembles as batched operations."""

from __future__ import annotations

from .rebuilding import Unit, Writer, rebuild
from .writing import Lowering, covered_operations, lower

__all__ = ["Lowering", "Unit", "Writer", "covered_operations", "lower", "rebuild"]

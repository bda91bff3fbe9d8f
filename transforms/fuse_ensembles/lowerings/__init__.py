"""Write ensembles into graphs; `table` holds the lowerings there are."""

from __future__ import annotations

from .batching_rules import BatchingRule
from .rebuilding import Unit, Writer, rebuild
from .table import Lowering, LoweringRule, lowerings_for, rule_called
from .units import Task, leaving_units

__all__ = [
    "BatchingRule", "Lowering", "LoweringRule", "Task", "Unit", "Writer", "leaving_units", "lowerings_for", "rebuild",
    "rule_called",
]  # fmt: skip

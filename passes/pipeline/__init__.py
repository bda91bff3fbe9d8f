"""From text to passes: parser, registry, order, supervision; and the plan of decisions."""

from __future__ import annotations

from .order import check_order
from .pipeline import parse
from .plan import SCHEMA_VERSION, STATUSES, Decision, Plan
from .registry import PassInfo, available, find_pass
from .supervision import supervised

__all__ = [
    "SCHEMA_VERSION",
    "STATUSES",
    "Decision",
    "PassInfo",
    "Plan",
    "available",
    "check_order",
    "find_pass",
    "parse",
    "supervised",
]

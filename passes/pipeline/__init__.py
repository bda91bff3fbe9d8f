"""From text to passes: parser, registry, order, supervision; the plan of decisions, and how ranks agree on one."""

from __future__ import annotations

from .order import check_order
from .pipeline import parse
from .plan import SCHEMA_VERSION, STATUSES, Decision, Plan
from .ranks import optimized_on_all, ranks
from .registry import PRESETS, PassInfo, available, find_pass, pass_names
from .supervision import supervised

__all__ = [
    "PRESETS",
    "SCHEMA_VERSION",
    "STATUSES",
    "Decision",
    "PassInfo",
    "Plan",
    "available",
    "check_order",
    "find_pass",
    "optimized_on_all",
    "parse",
    "pass_names",
    "ranks",
    "supervised",
]

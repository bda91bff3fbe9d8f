"""What an optimized model remembers of how it became what it is: its plan and its record, as data."""

from __future__ import annotations

from .plan import SCHEMA_VERSION, STATUSES, Decision, Measured, Plan
from .record import REPEATED, PassTrace, Record, needed_record, record_of, state_map_of
from .views import GraphView, NodeView, view_of

__all__ = [
    "REPEATED", "SCHEMA_VERSION", "STATUSES", "Decision", "GraphView", "Measured", "NodeView", "PassTrace", "Plan",
    "Record", "needed_record", "record_of", "state_map_of", "view_of",
]  # fmt: skip

"""Trace one forward into a graph: the tracer, and its parts for children, attributes and decisions."""

from __future__ import annotations

from .arguments import VARYING
from .assignments import assign
from .contexts import with_regions
from .decisions import BY_DATA
from .tracer import ModuleTracer, TracingSession
from .unrolled import Decided, UnrollingTracer

__all__ = [
    "BY_DATA", "VARYING", "Decided", "ModuleTracer", "TracingSession", "UnrollingTracer", "assign", "with_regions",
]  # fmt: skip

"""The graphs of a module: captures and their variants, the printed forward, the class that runs it."""

from __future__ import annotations

from .ambient import Ambient, ambient_now, outside_inference_mode
from .at_rest import FOUND
from .capture import Capture, RegionPlan, Variant, capture_of, required_capture
from .captured import (
    EVAL_ONLY,
    Captured,
    drop_variants,
    install,
    own,
    own_class,
    recompile,
    rest_again,
    uninstall,
    with_graph,
    with_variants,
)
from .contexts import Context
from .misses import HANDLER, Miss
from .portable import copy_graph
from .regions import ContextRegion, Region, context_regions
from .selection import fitting, select
from .shared_slices import SharedSlices, sharing
from .source import generate

__all__ = [
    "EVAL_ONLY",
    "FOUND",
    "HANDLER",
    "Ambient",
    "Capture",
    "Captured",
    "Context",
    "ContextRegion",
    "Miss",
    "Region",
    "RegionPlan",
    "SharedSlices",
    "Variant",
    "ambient_now",
    "capture_of",
    "context_regions",
    "copy_graph",
    "drop_variants",
    "fitting",
    "generate",
    "install",
    "outside_inference_mode",
    "own",
    "own_class",
    "recompile",
    "required_capture",
    "rest_again",
    "select",
    "sharing",
    "uninstall",
    "with_graph",
    "with_variants",
]

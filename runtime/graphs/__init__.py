"""The graphs of a module: captures and their specializations, the printed forward, the class that runs it."""

from __future__ import annotations

from .capture import (
    Capture,
    RegionPlan,
    Specialization,
    capture_of,
    graph_name,
    required_capture,
    specializations_of,
    usual,
    with_graph,
    with_specializations,
)
from .captured import (
    EVAL_ONLY,
    Captured,
    deactivate_again,
    drop_specializations,
    install,
    own,
    own_class,
    recompile,
    uninstall,
)
from .compiled_class import compile_postponed, postponing
from .contexts import Context, Opening, Surrounding
from .fallback import CACHES, attach, detach, fallback_of, misses_in
from .inactive import FOUND
from .items import note_added, note_removed
from .misses import Miss, this_call
from .portable import PortableGraph, copy_graph
from .rank_local import rank_local, trial_step
from .regions import (
    ContextRegion,
    Region,
    WrappedRegion,
    add_region,
    context_regions,
    regions_of,
    remove_region,
    share_children,
)
from .selection import fitting, select
from .source import generate

__all__ = [
    "CACHES", "EVAL_ONLY", "FOUND", "Capture", "Captured", "Context", "ContextRegion", "Miss", "Opening",
    "PortableGraph", "Region", "RegionPlan", "Specialization", "Surrounding", "WrappedRegion", "add_region",
    "attach", "capture_of", "compile_postponed", "context_regions", "copy_graph", "deactivate_again", "detach",
    "drop_specializations", "fallback_of", "fitting", "generate", "graph_name", "install", "misses_in",
    "note_added", "note_removed", "own", "own_class", "postponing", "rank_local", "recompile", "regions_of",
    "remove_region", "required_capture", "select", "share_children", "specializations_of", "this_call",
    "trial_step", "uninstall", "usual", "with_graph", "with_specializations",
]  # fmt: skip

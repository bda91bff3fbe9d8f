"""What a forward reads besides its arguments: configurations, globals, classes, what hangs on data."""

from __future__ import annotations

from .dataflow import LEAF_LIBRARY, DataFlow, leaf_function_places
from .locate import condition_of, frames_of_trace, is_users, raised_at, source_of, user_frame
from .nested import NestedReads, items_of
from .observe import OWN_CHILDREN, Observers, container_lengths, listing_of
from .outside_reads import OutsideReads, guards_on
from .reached_code import checks_exact_types, class_attribute, reached_functions

__all__ = [
    "LEAF_LIBRARY", "OWN_CHILDREN", "DataFlow", "NestedReads", "Observers", "OutsideReads", "checks_exact_types",
    "class_attribute", "condition_of", "container_lengths", "frames_of_trace", "guards_on", "is_users", "items_of",
    "leaf_function_places", "listing_of", "raised_at", "reached_functions", "source_of", "user_frame",
]  # fmt: skip

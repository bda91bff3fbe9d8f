"""Change programs: edits, regions, patterns, effects."""

from __future__ import annotations

from .changes import UnnotedChange, only_reading
from .edit import Edit
from .effects import handed_out, has_effects, writes, written_values
from .holding import asks_unchanged, hold_written_out, opened_by, paths_to
from .inlining import (
    Checks,
    Opener,
    bound,
    lasting_guards,
    only_builds,
    only_graph,
    reason_against_inlining,
    reason_against_opening,
    received,
    substituted,
    unmet_guards,
)
from .layers import (
    LAYERS,
    Layer,
    LayerCall,
    call_of_layer,
    holds_inputs_first,
    layer_of,
    reason_against_module,
    shape_of,
)
from .memory_order import lay_out_readers, readers_in
from .order import ReadsOutOfOrder
from .patterns import Match, Pattern, anything, either, module, operation
from .snapshot import Snapshot
from .spelling import Held, call_in, is_undisturbed, only_user
from .stacking import leave_views, reason_against_stacking, stack_members, tensor_of

__all__ = [
    "LAYERS", "Checks", "Edit", "Held", "Layer", "LayerCall", "Match", "Opener", "Pattern", "ReadsOutOfOrder",
    "Snapshot", "UnnotedChange", "anything", "asks_unchanged", "bound", "call_in", "call_of_layer", "either",
    "handed_out", "has_effects", "hold_written_out", "holds_inputs_first", "is_undisturbed", "lasting_guards",
    "lay_out_readers", "layer_of", "leave_views", "module", "only_builds", "only_graph", "only_reading", "only_user",
    "opened_by", "operation", "paths_to", "readers_in", "reason_against_inlining", "reason_against_module",
    "reason_against_opening", "reason_against_stacking", "received", "shape_of", "stack_members", "substituted",
    "tensor_of", "unmet_guards", "writes", "written_values",
]  # fmt: skip

"""Leave no trace on a model and its process: what is put back, what is watched, who waits for whom."""

from __future__ import annotations

from .changes import Change, Changes, Watch, is_repeatable
from .copying import Holding, copied_module, held_in, parts_of, plain_registries, shallow_clone, skeleton_of
from .numbers import KnownNumbers, moved_to_meta
from .parameter_data import ParameterData, trusted
from .preserve import AttributeState, Contents, ModelState, in_phase, memory_of, preserved, restoring
from .surroundings import (
    AutocastState,
    autocast_state_now,
    compiles,
    eagerly,
    is_in_compiled,
    outside_inference_mode,
    patching,
    redirect,
    rewrite_lock,
)

__all__ = [
    "AttributeState", "AutocastState", "Change", "Changes", "Contents", "Holding", "KnownNumbers", "ModelState",
    "ParameterData", "Watch", "autocast_state_now", "compiles", "copied_module", "eagerly", "held_in", "in_phase",
    "is_in_compiled", "is_repeatable", "memory_of", "moved_to_meta", "outside_inference_mode", "parts_of", "patching",
    "plain_registries", "preserved", "redirect", "restoring", "rewrite_lock", "shallow_clone", "skeleton_of",
    "trusted",
]  # fmt: skip

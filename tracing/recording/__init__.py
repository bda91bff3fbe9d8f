"""Run a model and note its calls, leave no trace on it, and compare what comes out."""

from __future__ import annotations

from .changes import Change, Changes, Watch, is_repeatable
from .compiled import compiles, eagerly, is_in_compiled
from .example_calls import recording
from .fallback import attach, detach, fallback_of, misses_in
from .generating import NO_STEP, calls_by_kind, calls_of_generate, generated_calls
from .held_tensors import change_count, plain_tensors
from .output_check import disagreeing, expectations
from .parameter_data import ParameterData
from .preserve import AttributeState, Contents, ModelState, in_phase, preserved, restoring
from .random_effects import (
    function_uses_host_random,
    has_random_effects,
    module_has_random_effects,
    tree_uses_host_random,
)
from .rank_local import is_rank_local, is_trial_step, rank_local, trial_step
from .record import Call, Computed, Recording, calls_intercepted, copy_inputs, record
from .redirect import patching, redirect
from .rewrite_lock import rewrite_lock
from .scripted import make_registries_plain, plain_registries
from .structural_hash import Cache, Described, Factors, HashLevel, StructuralHash

__all__ = [
    "NO_STEP",
    "AttributeState",
    "Cache",
    "Call",
    "Change",
    "Changes",
    "Computed",
    "Contents",
    "Described",
    "Factors",
    "HashLevel",
    "ModelState",
    "ParameterData",
    "Recording",
    "StructuralHash",
    "Watch",
    "attach",
    "calls_by_kind",
    "calls_intercepted",
    "calls_of_generate",
    "change_count",
    "compiles",
    "copy_inputs",
    "detach",
    "disagreeing",
    "eagerly",
    "expectations",
    "fallback_of",
    "function_uses_host_random",
    "generated_calls",
    "has_random_effects",
    "in_phase",
    "is_in_compiled",
    "is_rank_local",
    "is_repeatable",
    "is_trial_step",
    "make_registries_plain",
    "misses_in",
    "module_has_random_effects",
    "patching",
    "plain_registries",
    "plain_tensors",
    "preserved",
    "rank_local",
    "record",
    "recording",
    "redirect",
    "restoring",
    "rewrite_lock",
    "tree_uses_host_random",
    "trial_step",
]

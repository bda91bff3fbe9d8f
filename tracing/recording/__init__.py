"""Run a model and note its calls, leave no trace on it, and compare what comes out."""

from __future__ import annotations

from .alone import alone
from .changes import Change, Changes, Watch, is_repeatable
from .compiled import compiles, eagerly, is_in_compiled
from .example_calls import recording
from .fallback import fallback_of, hold, misses_in, release
from .generating import NO_STEP, calls_by_kind, calls_of_generate, generated_calls
from .held_tensors import change_count, plain_tensors
from .likeness import Alike, Cache, Described, Factors, Likeness
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
from .scripted import make_registries_plain, plain_registries

__all__ = [
    "NO_STEP",
    "Alike",
    "AttributeState",
    "Cache",
    "Call",
    "Change",
    "Changes",
    "Computed",
    "Contents",
    "Described",
    "Factors",
    "Likeness",
    "ModelState",
    "ParameterData",
    "Recording",
    "Watch",
    "alone",
    "calls_by_kind",
    "calls_intercepted",
    "calls_of_generate",
    "change_count",
    "compiles",
    "copy_inputs",
    "disagreeing",
    "eagerly",
    "expectations",
    "fallback_of",
    "function_uses_host_random",
    "generated_calls",
    "has_random_effects",
    "hold",
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
    "release",
    "restoring",
    "tree_uses_host_random",
    "trial_step",
]

"""Leave no trace on a model and its process: what is put back, what is watched, who waits for whom."""

from __future__ import annotations

from .changes import Change, Changes, Watch, is_repeatable
from .compiled import compiles, eagerly, is_in_compiled
from .held_tensors import ChangeCounts, change_count, plain_tensors
from .parameter_data import ParameterData
from .preserve import AttributeState, Contents, ModelState, in_phase, memory_of, preserved, restoring
from .rank_local import is_rank_local, is_trial_step, rank_local, trial_step
from .redirect import patching, redirect
from .rewrite_lock import rewrite_lock
from .scripted import make_registries_plain, plain_registries

__all__ = [
    "AttributeState",
    "Change",
    "ChangeCounts",
    "Changes",
    "Contents",
    "ModelState",
    "ParameterData",
    "Watch",
    "change_count",
    "compiles",
    "eagerly",
    "in_phase",
    "is_in_compiled",
    "is_rank_local",
    "is_repeatable",
    "is_trial_step",
    "make_registries_plain",
    "memory_of",
    "patching",
    "plain_registries",
    "plain_tensors",
    "preserved",
    "rank_local",
    "redirect",
    "restoring",
    "rewrite_lock",
    "trial_step",
]

"""Leave no trace on a model and its process: what is put back, what is watched, who waits for whom."""

from __future__ import annotations

from .changes import Change, Changes, Watch, is_repeatable
from .compiled import compiles, eagerly, is_in_compiled
from .parameter_data import ParameterData
from .preserve import AttributeState, Contents, ModelState, in_phase, memory_of, preserved, restoring
from .redirect import patching, redirect, rewrite_lock

__all__ = [
    "AttributeState",
    "Change",
    "Changes",
    "Contents",
    "ModelState",
    "ParameterData",
    "Watch",
    "compiles",
    "eagerly",
    "in_phase",
    "is_in_compiled",
    "is_repeatable",
    "memory_of",
    "patching",
    "preserved",
    "redirect",
    "restoring",
    "rewrite_lock",
]

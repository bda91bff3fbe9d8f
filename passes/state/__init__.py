"""How names and tensors change: state maps and their steps, checkpoints, optimizer state."""

from __future__ import annotations

from .checkpoints import RECORD_KEY, LoadsOriginalNames
from .copying import copied_module, skeleton_of, twin
from .holders import Holder, holder_of
from .optimizer_state import ELEMENT_WISE, translate_optimizer
from .state_map import StateMap
from .state_steps import Concatenate, Rename, Stack, StateStep

__all__ = [
    "ELEMENT_WISE",
    "RECORD_KEY",
    "Concatenate",
    "Holder",
    "LoadsOriginalNames",
    "Rename",
    "Stack",
    "StateMap",
    "StateStep",
    "copied_module",
    "holder_of",
    "skeleton_of",
    "translate_optimizer",
    "twin",
]

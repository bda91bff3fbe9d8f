"""How names and tensors change: state maps and their steps, checkpoints, optimizer state."""

from __future__ import annotations

from .checkpoints import RECORD_KEY, LoadsOriginalNames
from .copying import copied_module, skeleton_of, twin
from .functional import functional_state
from .holders import Holder, holder_of
from .optimizer_state import ELEMENT_WISE, check_type, translate_optimizer
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
    "check_type",
    "copied_module",
    "functional_state",
    "holder_of",
    "skeleton_of",
    "translate_optimizer",
    "twin",
]

"""How names and tensors change: state maps and their steps, checkpoints, optimizer state."""

from __future__ import annotations

from .checkpoints import RECORD_KEY, LoadsOriginalNames
from .copying import copied_module, outline_of, twin
from .optimizer_state import ELEMENT_WISE, translate_optimizer
from .owners import Owner, owner_of
from .state_map import StateMap
from .state_steps import Concatenate, Rename, Stack, StateStep

__all__ = [
    "ELEMENT_WISE",
    "RECORD_KEY",
    "Concatenate",
    "LoadsOriginalNames",
    "Owner",
    "Rename",
    "Stack",
    "StateMap",
    "StateStep",
    "copied_module",
    "outline_of",
    "owner_of",
    "translate_optimizer",
    "twin",
]

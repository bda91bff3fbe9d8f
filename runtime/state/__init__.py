"""How names and tensors change: state maps and their steps, checkpoints, optimizer state."""

from __future__ import annotations

from .added import adopt_added, live_optimizers, release_added
from .bits import packed, unpacked
from .checkpoints import (
    ADDED_TENSORS,
    RECORD_KEY,
    SETTLED,
    STATE_MAP,
    VIEWS,
    KeepsOriginalNames,
    absent_from_checkpoints,
    checkpointing_class,
    cut_from_sharded,
)
from .copying import copied_module, shallow_clone, skeleton_of
from .functional import functional_state
from .held import Holding, held_in, parts_of
from .holders import Holder, add_child, holder_of
from .in_parts import InParts, all_parameters, leave_to_other_ranks, whole_state
from .optimizer_state import (
    ELEMENT_WISE,
    check_type,
    element_wise,
    is_element_wise,
    steps_by_element,
    translate_optimizer,
)
from .quantized_steps import QuantizeTrained, QuantizeWeight, dequantized, quantized
from .scripted import make_registries_plain, plain_registries
from .sharding import gathered, refuse_sharded, sharded_like, sharded_state, writes_files
from .state_map import StateMap
from .state_steps import Concatenate, ConcatenateOfSome, Mask, Rename, Select, Stack, StackOfSome, StateStep, merge
from .tensor_hooks import carry_tensor_hooks, lost_hooks_text

__all__ = [
    "ADDED_TENSORS",
    "ELEMENT_WISE",
    "RECORD_KEY",
    "SETTLED",
    "STATE_MAP",
    "VIEWS",
    "Concatenate",
    "ConcatenateOfSome",
    "Holder",
    "Holding",
    "InParts",
    "KeepsOriginalNames",
    "Mask",
    "QuantizeTrained",
    "QuantizeWeight",
    "Rename",
    "Select",
    "Stack",
    "StackOfSome",
    "StateMap",
    "StateStep",
    "absent_from_checkpoints",
    "add_child",
    "adopt_added",
    "all_parameters",
    "carry_tensor_hooks",
    "check_type",
    "checkpointing_class",
    "copied_module",
    "cut_from_sharded",
    "dequantized",
    "element_wise",
    "functional_state",
    "gathered",
    "held_in",
    "holder_of",
    "is_element_wise",
    "leave_to_other_ranks",
    "live_optimizers",
    "lost_hooks_text",
    "make_registries_plain",
    "merge",
    "packed",
    "parts_of",
    "plain_registries",
    "quantized",
    "refuse_sharded",
    "release_added",
    "shallow_clone",
    "sharded_like",
    "sharded_state",
    "skeleton_of",
    "steps_by_element",
    "translate_optimizer",
    "unpacked",
    "whole_state",
    "writes_files",
]

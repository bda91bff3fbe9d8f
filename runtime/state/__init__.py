"""How names and tensors change: state maps and their steps, checkpoints, optimizer state."""

from __future__ import annotations

from .checkpoints import (
    ADDED_TENSORS,
    RECORD_KEY,
    SETTLED,
    STATE_MAP,
    VIEWS,
    KeepsOriginalNames,
    Loading,
    absent_from_checkpoints,
    checkpointing_class,
    cut_from_sharded,
)
from .holders import Holder, add_child, holder_of
from .optimizer_state import (
    ELEMENT_WISE,
    check_type,
    element_wise,
    is_element_wise,
    steps_by_element,
    translate_optimizer,
)
from .pieces import Piece
from .quantized_steps import (
    FORMATS,
    QuantizeByData,
    QuantizeSmoothed,
    QuantizeTrained,
    QuantizeWeight,
    dequantized,
    numbers_in,
    powers_of,
    quantized,
    text_of_numbers,
)
from .sharding import (
    InParts,
    all_parameters,
    functional_state,
    gathered,
    leave_to_other_ranks,
    refuse_sharded,
    sharded_like,
    sharded_state,
    whole_state,
    writes_files,
)
from .state_map import StateMap
from .state_steps import (
    Concatenate,
    Deal,
    Mask,
    Rename,
    Select,
    Stack,
    StateStep,
    merge,
    packed,
    unpacked,
)

__all__ = [
    "ADDED_TENSORS", "ELEMENT_WISE", "FORMATS", "RECORD_KEY", "SETTLED", "STATE_MAP", "VIEWS", "Concatenate", "Deal",
    "Holder", "InParts", "KeepsOriginalNames", "Loading", "Mask", "Piece", "QuantizeByData", "QuantizeSmoothed",
    "QuantizeTrained", "QuantizeWeight", "Rename", "Select", "Stack", "StateMap", "StateStep",
    "absent_from_checkpoints", "add_child", "all_parameters", "check_type", "checkpointing_class", "cut_from_sharded",
    "dequantized", "element_wise", "functional_state", "gathered", "holder_of", "is_element_wise",
    "leave_to_other_ranks", "merge", "numbers_in", "packed", "powers_of", "quantized", "refuse_sharded", "sharded_like",
    "sharded_state", "steps_by_element", "text_of_numbers", "translate_optimizer", "unpacked", "whole_state",
    "writes_files",
]  # fmt: skip

"""Guards: a source says what is read at a call, a check says what must hold; they are printed last."""

from __future__ import annotations

from .expressions import DESCRIPTIONS, SWITCHES, is_switch, question, source_of_node
from .guards import (
    NOT_HELD,
    Check,
    Condition,
    Equals,
    Guard,
    GuardMiss,
    Has,
    Is,
    IsNot,
    Lacks,
    Tally,
    Truth,
    equal,
    exactly,
    fits,
    in_evaluation,
    is_tensor,
    of_class,
    require,
    same_type,
)
from .outside import LIBRARIES, cells_of, own_cells
from .sources import (
    SELF,
    Argument,
    Attribute,
    Call,
    Constant,
    Dictionary,
    Globals,
    Item,
    Known,
    Method,
    Source,
    attribute_at,
    children_of,
    constant,
    is_outside,
    is_training,
    item_of,
    key_of,
    length_of,
    module_at,
    reader,
    type_of,
)
from .spelling import attribute_text

__all__ = [
    "DESCRIPTIONS", "LIBRARIES", "NOT_HELD", "SELF", "SWITCHES", "Argument", "Attribute", "Call", "Check", "Constant",
    "Condition", "Dictionary", "Equals", "Globals", "Guard", "GuardMiss", "Has", "Is", "IsNot", "Item", "Known", "Lacks", "Method",
    "Source", "Tally", "Truth", "attribute_at", "attribute_text", "cells_of", "children_of", "constant", "equal",
    "exactly", "fits", "in_evaluation", "is_outside", "is_switch", "is_tensor", "is_training", "item_of", "key_of",
    "length_of", "module_at", "of_class", "own_cells", "question", "reader", "require", "same_type", "source_of_node",
    "type_of",
]  # fmt: skip

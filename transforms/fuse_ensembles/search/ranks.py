"""What decides how many dimensions an operand has: that may differ from call to call, so no example is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from ....operators import operator_info
from ..inlining import Operation
from .packs import Operand, Pack, Parameters, Selected, Shared, attribute

__all__ = ["dimensional_slots", "operand_ranks"]


def operand_ranks(operand: Operand, owner: nn.Module) -> frozenset[object]:
    """Return what decides an operand's number of dimensions; nothing where it has one at the most."""
    match operand:
        case Pack():
            return operand.ranks if operand.result == "stacked" else frozenset[object]()
        case Shared() if _is_flat(operand.operation.example) or _is_flat_attribute(operand.operation, owner):
            return frozenset()
        case Parameters() if _is_flat(attribute(owner, operand.names[0])):
            return frozenset()
        case Selected():
            return frozenset((Selected(operand.source, 0),))
        case _:
            return frozenset((operand,))


def dimensional_slots(operands: Sequence[Operand], owner: nn.Module) -> frozenset[int]:
    """Return the positions of stacked operands of which each member has one dimension at the least, at every call."""
    return frozenset(slot for slot, operand in enumerate(operands) if _has_dimensions(operand, owner))


def _has_dimensions(operand: Operand, owner: nn.Module) -> bool:
    if isinstance(operand, Parameters):
        tensor = attribute(owner, operand.names[0])
        return isinstance(tensor, torch.Tensor) and tensor.dim() > 0
    if not isinstance(operand, Pack):
        return False
    if operator_info(operand.operator).elementwise:
        return bool(operand.dimensional)
    return _gives_dimensions(operand) or _keeps_dimensions(operand)


def _gives_dimensions(pack: Pack) -> bool:
    """Say whether results have one dimension at the least, whatever is read; of modules only such ones are packed."""
    return pack.operator in ("module", "recurrent") or operator_info(pack.operator).has_dimensions


def _keeps_dimensions(pack: Pack) -> bool:
    """Say whether an operator keeps dimensions of its first operand, or is told how many to give."""
    args, _ = pack.arguments
    if pack.operator in ("view", "reshape", "expand"):
        sizes: tuple[Any, ...] = args[1:]
        if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
            return len(cast("Sequence[Any]", sizes[0])) > 0
        return len(sizes) > 1
    if pack.operator == "getitem":
        index = args[1]
        parts = cast("tuple[object, ...]", index if isinstance(index, tuple) else (index,))
        source = pack.operands[0]
        several = isinstance(source, Pack) and source.result == "several" and _gives_dimensions(source)
        return several or any(part is None or isinstance(part, slice) for part in parts)
    return operator_info(pack.operator).keeps_rank and pack.has_dimensions(0)


def _is_flat(value: object) -> bool:
    """Say whether a value is a number, or a parameter or buffer with one dimension at the most."""
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() <= 1)


def _is_flat_attribute(operation: Operation, owner: nn.Module) -> bool:
    return operation.kind == "get_attr" and _is_flat(attribute(owner, str(operation.target)))

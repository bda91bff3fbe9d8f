"""Operations in one spelling: operands apart from everything else, in-place forms as the functions they act like."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from .expansion import Operation, map_structure
from .operators import POINTWISE, function_of
from .packs import Slot

__all__ = ["normal_form", "packable", "writes_to_fresh_value"]


def packable(operation: Operation) -> bool:
    """Say whether a rule exists that computes N of these at once, and no write makes their order matter."""
    if operation.operator != "linear" and operation.operator not in POINTWISE:
        return False
    if not operation.mutates and not _asks_in_place(operation):
        return True
    return writes_to_fresh_value(operation)


def writes_to_fresh_value(operation: Operation) -> bool:
    """Say whether an in-place operator overwrites a new value that nothing else reads: then it acts like its functional form."""
    target = next(operation.inputs, None)
    if target is None or len(target.users) != 1 or target.mutates:
        return False
    return target.operator == "linear" or (target.operator in POINTWISE and target.kind != "get_attr")


def normal_form(operation: Operation) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], list[Operation]]:
    """Return the arguments with slots in the place of operands, and the operands; in-place flags are left out."""
    args, kwargs = _bound(operation)
    operands: list[Operation] = []

    def slot(leaf: Any) -> Any:
        if not isinstance(leaf, Operation):
            return leaf
        operands.append(leaf)
        return Slot(len(operands) - 1)

    return map_structure((args, kwargs), slot), operands


def _bound(operation: Operation) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments in one spelling: operands of a linear layer positional, `inplace` left out."""
    signature = _signature(operation.operator or "")
    if signature is None:
        return operation.args, {k: v for k, v in operation.kwargs.items() if k != "inplace"}
    bound = signature.bind(*operation.args, **operation.kwargs)
    if operation.operator != "linear":
        bound.apply_defaults()
    bound.arguments.pop("inplace", None)
    if operation.operator == "linear":
        return tuple(bound.arguments.get(name) for name in ("input", "weight", "bias")), {}
    first, *rest = bound.arguments.items()
    return (first[1],), dict(rest)


@cache
def _signature(operator: str) -> inspect.Signature | None:
    if operator == "linear":
        names = ("input", "weight", "bias")
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature(
            [inspect.Parameter(n, kind, default=None if n == "bias" else inspect.Parameter.empty) for n in names]
        )
    try:
        signature = inspect.signature(function_of(operator))
    except (ValueError, KeyError):
        return None
    return signature if "inplace" in signature.parameters else None


def _asks_in_place(operation: Operation) -> bool:
    signature = _signature(operation.operator or "")
    if signature is None or "inplace" not in signature.parameters:
        return False
    return bool(signature.bind(*operation.args, **operation.kwargs).arguments.get("inplace"))

"""Operations in one spelling: operands apart from everything else, in-place forms as the functions they act like."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from .expansion import Operation, map_structure
from .operators import POINTWISE, VECTORIZABLE, function_of, function_path
from .packs import Slot

__all__ = ["normal_form", "packable", "writes_to_fresh_value"]


def packable(operation: Operation) -> bool:
    """Say whether a rule exists that computes N of these at once, and no write makes their order matter."""
    if operation.kind == "call_module":
        return operation.operator is not None
    if operation.operator not in _COMPUTABLE or not _plain(operation):
        return False
    if not operation.mutates and not _asks_in_place(operation):
        return True
    return writes_to_fresh_value(operation)


def writes_to_fresh_value(operation: Operation) -> bool:
    """Say whether an in-place operator overwrites a new value that nothing else reads: then it acts like its functional form."""
    target = next(operation.inputs, None)
    if target is None or len(target.users) != 1 or target.mutates:
        return False
    return target.operator in _FRESH or (target.operator in POINTWISE and target.kind != "get_attr")


_COMPUTABLE = POINTWISE | VECTORIZABLE | {"linear"}
_FRESH = frozenset(
    "linear matmul bmm batch_norm layer_norm group_norm rms_norm embedding conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d".split()
)
"""Operators whose results share no memory with what they read."""


def _plain(operation: Operation) -> bool:
    """Say whether a call keeps to values: it writes into nothing, and its gradients are dense."""
    if operation.operator in POINTWISE or operation.operator == "linear":
        return True
    if operation.operator == "getitem" and isinstance(operation.args[1], Operation):
        return False
    if operation.kwargs.get("max_norm") is not None or operation.kwargs.get("sparse"):
        return False
    if operation.kwargs.get("return_indices") or operation.kwargs.get("out") is not None:
        return False
    return function_path(operation.node) is not None


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

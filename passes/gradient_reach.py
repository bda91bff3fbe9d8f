"""Which outputs of a module a value can receive gradients from."""

from __future__ import annotations

from typing import Any

from .expansion import Expansion, Operation

__all__ = ["differentiable_outputs"]

_STOPS = frozenset(
    "detach detach_ argmax argmin argsort bitwise_and bitwise_or bitwise_xor bitwise_not eq ne lt le gt ge isnan isinf "
    "isfinite logical_and logical_or logical_xor logical_not signbit item tolist numpy size dim numel shape".split()
)


def differentiable_outputs(expansion: Expansion) -> dict[Operation, int]:
    """Return for each operation a bit mask of the module's output leaves that it can receive gradients from.

    A call that is not understood is taken to pass gradients on.
    """
    reach: dict[Operation, int] = {}
    leaves = _output_leaves(expansion)
    for operation in reversed(expansion.operations):
        mask = leaves.get(operation, 0)
        for user in operation.users:
            if not _stops_gradients(user):
                mask |= reach.get(user, 0)
        reach[operation] = mask
    return reach


def _output_leaves(expansion: Expansion) -> dict[Operation, int]:
    output = next(op for op in reversed(expansion.operations) if op.kind == "output")
    leaves: dict[Operation, int] = {}
    for number, operation in enumerate(output.inputs):
        leaves[operation] = leaves.get(operation, 0) | 1 << number
    return leaves


def _stops_gradients(operation: Operation) -> bool:
    name: Any = operation.operator or getattr(operation.target, "__name__", operation.target)
    return str(name) in _STOPS

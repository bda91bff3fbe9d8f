"""What can take the place of operations that users write: an operator, and the decompositions that mean the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Kernel"]


@dataclass(frozen=True)
class Kernel:
    """An operator, and what is written in its place.

    Attributes:
        name: what the option `kernels` of `swap_kernels` calls it.
        compute: calls the operator; it takes what decompositions find, by name, and decides nothing by tensors.
        decompositions: functions that compute the same in operations of torch. A parameter annotated `Tensor` stands
            for any tensor, other types for a plain value; one with a default is not looked for, but handed to
            `compute`. Casts between floating dtypes are looked through.
        into: a kernel whose operand `x` is what the decompositions compute. The operator takes its other operands, too,
            and returns its result and what that is computed of, which others may read.
    """

    name: str
    compute: Callable[..., Any]
    decompositions: tuple[Callable[..., Any], ...]
    into: Kernel | None = None

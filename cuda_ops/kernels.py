"""What can take the place of operations that users write: an operator, and the spellings that mean the same."""

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
        compute: calls the operator; it takes what spellings find, by name, and decides nothing by tensors.
        spellings: functions that compute the same in operations of torch. A parameter annotated `Tensor` stands for
            any tensor, `float`, `int` or `tuple` for a plain value; one with a default is not looked for, but handed to
            `compute`. Casts between floating dtypes need not be written: they are looked through.
    """

    name: str
    compute: Callable[..., Any]
    spellings: tuple[Callable[..., Any], ...]

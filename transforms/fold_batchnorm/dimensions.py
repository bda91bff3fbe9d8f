"""A check in graphs on how many dimensions a tensor has."""

from __future__ import annotations

from torch import Tensor

from ...errors import GuardError

__all__ = ["expect_dimensions"]


def expect_dimensions(x: Tensor, count: int) -> None:
    """Make sure that a batch norm that was folded would have normed the dimension that it was folded for.

    Args:
        x: what comes in, any shape.
        count: how many dimensions it must have.

    Raises:
        GuardError: if it has more or fewer.
    """
    if x.dim() != count:
        raise GuardError(
            f"a batch norm was folded for inputs of {count} dimensions, but this input has {x.dim()}; give "
            "fxopt.optimize example_inputs with as many"
        )

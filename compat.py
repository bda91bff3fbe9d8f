"""Every private or version-dependent torch API that fxopt uses, one small function each, in alphabetical order."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

__all__ = ["is_random_operator", "is_view_operator", "written_arguments"]


@cache
def is_random_operator(operator: Any) -> bool:
    """Say whether a dispatched operator draws from a random generator."""
    return torch.Tag.nondeterministic_seeded in operator.tags


@cache
def is_view_operator(operator: Any) -> bool:
    """Say whether a dispatched operator's result shares its argument's storage (`lift_fresh` yields a new tensor)."""
    return operator.is_view and operator is not torch.ops.aten.lift_fresh.default


@cache
def written_arguments(operator: Any) -> frozenset[int | str]:
    """Return the positions and the names of the arguments that a dispatched operator writes into."""
    arguments = enumerate(operator._schema.arguments)
    written = [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return frozenset(key for pair in written for key in pair)

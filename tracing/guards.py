"""What a capture assumed: conditions over the arguments, and conditions in the middle of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ..errors import GuardError
from .outside import cells_of, globals_of
from .rollback import Kept
from .signature import Absent

__all__ = ["GUARD_NAMES", "NOT_HELD", "Guard", "GuardMiss", "Tally", "require"]

GUARD_NAMES: Mapping[str, Any] = {
    "Absent": Absent,
    "Tensor": Tensor,
    "torch": torch,
    "bool": bool,
    "getattr": getattr,
    "hasattr": hasattr,
    "isinstance": isinstance,
    "len": len,
    "dict": dict,
    "list": list,
    "tuple": tuple,
    "type": type,
    "int": int,
    "float": float,
    "str": str,
    "bytes": bytes,
    "fxopt_cells": cells_of,
    "fxopt_globals": globals_of,
}
"""What guard expressions may call; no argument of a captured forward may have one of these names."""
NOT_HELD = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)
"""What a guard that cannot be evaluated raises: it does not hold."""


@dataclass(frozen=True, slots=True)
class Guard:
    """One condition that a capture holds under.

    Attributes:
        expression: Python over the forward's arguments and `self`, true where the capture holds.
        reason: what was assumed, and where, for the report.
    """

    expression: str
    reason: str

    def holds(self, names: Mapping[str, Any]) -> bool:
        """Evaluate the guard for a call whose arguments (and `self`) are `names`; an error counts as no."""
        try:
            # The expression was written by the tracer from a module's own attribute reads.
            return bool(eval(_compiled(self.expression), dict(GUARD_NAMES), dict(names)))  # noqa: S307
        except NOT_HELD:
            return False


@lru_cache(maxsize=1024)
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<guard>", "eval")


@dataclass(slots=True)
class Tally:
    """Count how often a check of a decision by data was made, and how often it missed; all tallies are equal."""

    checks: int = field(default=0, compare=False)
    misses: int = field(default=0, compare=False)

    def __hash__(self) -> int:
        return hash(Tally)

    def is_hopeless(self) -> bool:
        """Tell, every 16 misses, whether more than half of the checks since the last time missed."""
        if self.misses < _WINDOW:
            return False
        mostly = 2 * self.misses > self.checks
        self.checks = self.misses = 0
        return mostly


_WINDOW = 16


class GuardMiss(Exception):
    """An assumption about an intermediate value does not hold; the captured forward catches it and starts over.

    Attributes:
        tally: how often it held so far, where it is about the data in a tensor; else None.
    """

    def __init__(self, reason: str, tally: Tally | None = None) -> None:
        super().__init__(reason)
        self.tally = tally


def require(value: Any, expected: Any, reason: str, restart: bool | Kept = True, tally: Tally | None = None) -> None:
    """Check, in the middle of a graph, that `value` is still what a decision was based on.

    Args:
        value: the value now.
        expected: the value at capture; True and False stand for the truth of `value`.
        reason: what was decided, and where.
        restart: whether nothing has happened so far that running the module's own forward would repeat; or what
            takes back what has.
        tally: counts the checks, where the value hangs on the data in a tensor.

    Raises:
        GuardMiss: if it is not, and the module may start over.
        GuardError: if it is not, and it may not.
    """
    if tally is not None:
        tally.checks += 1
    if isinstance(expected, bool):
        same = value is not None and bool(value) is expected  # at capture it was something
    elif expected is None:
        same = value is None
    else:
        same = value == expected
    if same:
        return
    if tally is not None:
        tally.misses += 1
    if isinstance(restart, Kept):
        restart.restore()
    if restart:
        raise GuardMiss(reason, tally)
    raise GuardError(f"{reason}; the value is now {value!r}. Give example_inputs that cover this case too")

"""Conditions on modes: which graphs of a module run in which mode, and how a caller asks for the mode of a child."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from ....tracing.graphs import required_capture
from ....tracing.guards import SELF, Guard, is_outside, module_at

if TYPE_CHECKING:
    from ....tracing.program import Program

__all__ = ["Case", "cases_of", "child_guard", "is_passed_on"]


@dataclass(frozen=True)
class Case:
    """One of a home's graphs in one mode.

    Attributes:
        variant: its number.
        flipped: whether every module is in the other mode than now.
        asks: whether the graph itself is for one mode only.
    """

    variant: int
    flipped: bool
    asks: bool


def cases_of(program: Program, home: str) -> list[Case]:
    """Return every graph of a home in each mode that it runs in, those that run in the present mode first."""
    cases = program.analyses[_Cases].by_home
    if home not in cases:
        cases[home] = _cases_of(program.module(home))
    return cases[home]


class _Cases:
    """The cases of each home, worked out once until the program changes."""

    def __init__(self) -> None:
        self.by_home: dict[str, list[Case]] = {}

    @classmethod
    def compute(cls, program: Program) -> _Cases:
        return cls()


def _cases_of(module: nn.Module) -> list[Case]:
    variants = required_capture(module).variants
    return [
        Case(number, flipped, any(guard.asks_for_training for guard in variant.guards))
        for flipped in (False, True)
        for number, variant in enumerate(variants)
        if variant.runs_in_mode(module, flipped=flipped)
    ]


def is_passed_on(guard: Guard) -> bool:
    """Say whether a module that opens another one takes this condition of it for its own: on modes, or from outside."""
    return guard.asks_for_training or any(map(is_outside, guard.sources()))


def child_guard(guard: Guard, path: str) -> Guard:
    """Return a child's condition as one of the module that holds it at `path`."""
    return guard.over({SELF: module_at(path.split("."))})

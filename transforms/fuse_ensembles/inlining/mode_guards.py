"""Conditions on modes: which graphs of a module run in which mode, and how a caller asks for the mode of a child."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ....runtime.graphs import required_capture
from ....runtime.guards import SELF, Attribute, Guard, Item, Source, is_outside, module_at
from ....tracing.program import Program

__all__ = ["Case", "cases_of", "child_guard", "is_passed_on"]


@dataclass(frozen=True)
class Case:
    """One of a owner's graphs in one mode."""

    specialization: int  # its number
    flipped: bool  # whether every module is in the other mode than now
    asks: bool  # whether the graph itself is for one mode only


def cases_of(program: Program, owner: str) -> list[Case]:
    """Return every graph of a owner in each mode that it runs in, those that run in the present mode first."""
    cases = program.analyses[_Cases].by_owner
    if owner not in cases:
        cases[owner] = _cases_of(program.module(owner))
    return cases[owner]


class _Cases:
    """The cases of each owner, worked out once until the program changes."""

    def __init__(self) -> None:
        self.by_owner: dict[str, list[Case]] = {}

    @classmethod
    def compute(cls, program: Program) -> _Cases:
        return cls()


def _cases_of(module: nn.Module) -> list[Case]:
    specializations = required_capture(module).specializations
    return [
        Case(number, flipped, any(guard.asks_for_training for guard in specialization.guards))
        for flipped in (False, True)
        for number, specialization in enumerate(specializations)
        if specialization.runs_in_mode(module, flipped=flipped)
    ]


def is_passed_on(guard: Guard) -> bool:
    """Say whether a module that opens another takes this condition for its own: nothing else asks for it there."""
    sources = list(guard.sources())
    return guard.asks_for_training or any(is_outside(each) or _is_of_a_child(each) for each in sources)


def _is_of_a_child(source: Source) -> bool:
    match source:
        case Attribute(Item(Attribute(_, "_modules")), name):
            return name != "_modules"
        case _:
            return False


def child_guard(guard: Guard, path: str) -> Guard:
    """Return a child's condition as one of the module that holds it at `path`."""
    return guard.over({SELF: module_at(path.split("."))})

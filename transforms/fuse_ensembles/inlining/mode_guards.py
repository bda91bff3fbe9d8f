"""Conditions on modes: which graphs of a module run in which mode, and how a caller asks for the mode of a child."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import nn

from ....compat import own_children
from ....tracing.capture import required_capture
from ....tracing.captured import Guard, Variant
from ....tracing.outside import looks_outside
from ....tracing.source import module_expression

if TYPE_CHECKING:
    from ....tracing.program import Program

__all__ = ["Case", "asks_for_training", "cases_of", "child_guard", "is_passed_on", "runs_in_mode"]

_TRAINING = re.compile(r"\.training\b")


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
        Case(number, flipped, any(map(asks_for_training, variant.guards)))
        for flipped in (False, True)
        for number, variant in enumerate(variants)
        if runs_in_mode(module, variant, flipped)
    ]


def asks_for_training(guard: Guard) -> bool:
    """Say whether a condition is about the mode of a module."""
    return _names_training(guard.expression)


@lru_cache(maxsize=1024)
def _names_training(expression: str) -> bool:
    return _TRAINING.search(expression) is not None


def runs_in_mode(module: nn.Module, variant: Variant, flipped: bool) -> bool:
    """Say whether a graph is for the mode that `module` and its children are in or, if `flipped`, for the other."""
    names = {"self": _Moded(module, flipped)}
    return all(guard.holds(names) for guard in variant.guards if asks_for_training(guard))


def is_passed_on(guard: Guard) -> bool:
    """Say whether a module that opens another one takes this condition of it for its own: on modes, or from outside."""
    return asks_for_training(guard) or looks_outside(guard.expression)


def child_guard(guard: Guard, path: str) -> Guard:
    """Return a child's condition as one of the module that holds it at `path`."""
    return Guard(_asked_of(guard.expression, module_expression(path.split("."))), guard.reason)


def _asked_of(expression: str, module: str) -> str:
    """Return a condition with another module for `self`; texts in it that say "self" stay."""
    text = expression.encode()  # which columns are counted in
    for start, end in reversed(_places_of_self(expression)):
        text = text[:start] + module.encode() + text[end:]
    return text.decode()


@lru_cache(maxsize=1024)
def _places_of_self(expression: str) -> tuple[tuple[int, int], ...]:
    nodes = ast.walk(ast.parse(expression, mode="eval"))
    found = [(n.col_offset, n.end_col_offset or 0) for n in nodes if isinstance(n, ast.Name) and n.id == "self"]
    return tuple(sorted(found))


class _Moded:
    """Stand for a module whose mode, and whose children's, may be the other one."""

    def __init__(self, module: nn.Module, flipped: bool) -> None:
        self._module, self._flipped = module, flipped

    @property
    def training(self) -> bool:
        return self._module.training is not self._flipped

    @property
    def _modules(self) -> Mapping[str, Any]:
        return _Children(self._module, self._flipped)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return _Moded(value, self._flipped) if isinstance(value, nn.Module) else value


class _Children(Mapping[str, Any]):
    """Stand for the children of a module."""

    def __init__(self, module: nn.Module, flipped: bool) -> None:
        self._children, self._flipped = own_children(module), flipped

    def __getitem__(self, name: str) -> Any:
        child = self._children[name]
        return None if child is None else _Moded(child, self._flipped)

    def __iter__(self) -> Iterator[str]:
        return iter(self._children)

    def __len__(self) -> int:
        return len(self._children)

"""Which modules are alike: what is found out about one of them holds for all."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn

from ..compat import has_hooks, own_buffers, own_children, own_parameters
from ..tracing.captured import capture_of
from ..tracing.guards import GUARD_NAMES
from ..tracing.observe import INTERNAL

if TYPE_CHECKING:
    from ..tracing.program import Program

__all__ = ["PLAIN", "Kinds", "found_in_graphs"]

T = TypeVar("T")

PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
"""Types of values that are told by their text."""


class Kinds:
    """The kinds of a program's modules, each described once until the program changes.

    Modules of one kind have one class, the same graphs, plain attributes of equal values (any other are the same
    objects), the same mode, tensors of the same names, hooks or none, and under the same names children of one kind.
    What their graphs ask of their tensors (`self.weight.requires_grad`) has the same answers.
    """

    def __init__(self) -> None:
        self._of: dict[nn.Module, int] = {}
        self._numbers: dict[Hashable, int] = {}

    @classmethod
    def compute(cls, program: Program) -> Kinds:
        return cls()

    def of(self, module: nn.Module) -> int:
        """Return the number of a module's kind."""
        known = self._of.get(module)
        if known is None:
            known = self._of[module] = self._numbers.setdefault(self._described(module), len(self._numbers))
        return known

    def _described(self, module: nn.Module) -> Hashable:
        attributes: dict[str, Any] = vars(module)
        own = [(name, _value(value)) for name, value in attributes.items() if name not in INTERNAL]
        named = own_children(module).items()
        children = [(name, None if child is None else self.of(child)) for name, child in named] if named else ()
        tensors = *_names(own_parameters(module)), None, *_names(own_buffers(module))
        answers = _answers(module) if "_fxopt_capture" in attributes else ()
        return type(module), module.training, has_hooks(module), tuple(own), tensors, tuple(children), tuple(answers)


def found_in_graphs(
    program: Program, look: Callable[[fx.Graph, Program, str], T]
) -> Iterator[tuple[str, int, fx.Graph, T]]:
    """Yield the home and the number of each graph, the graph, and what `look(graph, program, home)` finds in it.

    Modules of a kind have the same graphs: what is found in those of the first is handed out for all of them.
    """
    kinds, known = program.analyses[Kinds], dict[tuple[int, int], T]()
    for home, capture in program.captures.items():
        kind = kinds.of(program.module(home))
        for number, variant in enumerate(capture.variants):
            if (kind, number) not in known:
                known[kind, number] = look(variant.graph, program, home)
            yield home, number, variant.graph, known[kind, number]


def _answers(module: nn.Module) -> list[bool]:
    """Return which of the conditions on the module itself hold, in all its graphs."""
    capture = capture_of(module)
    variants = () if capture is None else capture.variants
    asked = (guard for variant in variants for guard in variant.guards if _asks_module(guard.expression))
    return [guard.holds({"self": module}) for guard in asked]


@lru_cache(maxsize=1024)
def _asks_module(expression: str) -> bool:
    """Say whether a condition is on the module alone, and not settled by how many children it has."""
    found = [node for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)]
    names = {node.id for node in found} - {node.id for node in found if isinstance(node.ctx, ast.Store)}
    return "self" in names and names <= {"self", *GUARD_NAMES} and not _COUNTS_CHILDREN.fullmatch(expression)


_COUNTS_CHILDREN = re.compile(r"len\(self(\._modules(\['[^']*'\])?)+\) == \d+")


def _value(value: Any) -> Hashable:
    """Return what tells a value from others; of a tensor only that it is one, of other objects which one."""
    kind = cast("type[object]", type(value))
    if kind in PLAIN:
        return kind, value
    if kind is tuple or kind is list:
        return kind, tuple(_value(item) for item in value)
    return Tensor if isinstance(value, Tensor) else id(value)


def _names(registry: Mapping[str, Tensor | None]) -> list[Hashable]:
    """Return the names in a registry, and which of them stand for none."""
    return [(name, tensor is None) for name, tensor in registry.items()]

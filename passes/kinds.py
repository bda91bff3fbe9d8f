"""Which modules are alike: what is found out about one of them holds for all."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn

from ..compat import has_hooks, own_buffers, own_children, own_parameters
from ..tracing.captured import capture_of
from ..tracing.guards import Equals, Guard
from ..tracing.observe import INTERNAL
from ..tracing.sources import SELF, Argument, Attribute, Call, Constant, Item, Source

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
    asked = (guard for variant in variants for guard in variant.guards if _asks_module(guard))
    return [guard.holds({"self": module}) for guard in asked]


def _asks_module(guard: Guard) -> bool:
    """Say whether a condition is on the module alone, and not settled by how many children it has."""
    arguments = {source for source in guard.sources() if isinstance(source, Argument)}
    return arguments == {SELF} and not (isinstance(guard.check, Equals) and _counts_children(guard.source))


def _counts_children(source: Source) -> bool:
    match source:
        case Call(function, (counted,)) if function is len:
            return all(_is_child_or_registry(part) for part in counted.all() if not isinstance(part, Constant))
        case _:
            return False


def _is_child_or_registry(source: Source) -> bool:
    return source == SELF or isinstance(source, Item) or (isinstance(source, Attribute) and source.name == "_modules")


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

"""A place in a captured model, and what a rewrite needs to know and to do there."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from fxopt.passes.rewriting import Edit
from fxopt.tracing.program import Program


@dataclass(frozen=True)
class Place:
    """A node in the graph of one module of a captured model."""

    program: Program
    owner: str
    node: fx.Node
    edit: Edit | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.node.graph

    @property
    def module(self) -> nn.Module:
        """Return the module that the node calls."""
        return self.program.module(self.owner).get_submodule(str(self.node.target))

    def is_call(self, *names: str) -> bool:
        """Say whether the node calls a function or method of one of these names."""
        if self.node.op == "call_method":
            return self.node.target in names
        return self.node.op == "call_function" and getattr(self.node.target, "__name__", "") in names

    def calls(self, *kinds: type[nn.Module]) -> bool:
        return self.node.op == "call_module" and isinstance(self.module, kinds)

    def replace(self, make: Callable[..., Any], *args: Any) -> None:
        """Replace the node by a call of `make`."""
        with self.graph.inserting_before(self.node):
            new = self.graph.call_function(make, args or self.node.args, {} if args else self.node.kwargs)
        self.node.replace_all_uses_with(new)
        self.graph.erase_node(self.node)

    def set(self, name: str, value: object) -> None:
        """Set an attribute of the module that the node calls."""
        module, before = self.module, getattr(self.module, name)
        setattr(module, name, value)
        if self.edit is not None:
            self.edit.on_undo(lambda: setattr(module, name, before))

    def parameters(self, *names: str) -> list[fx.Node]:
        with self.graph.inserting_before(self.node):
            return [self.graph.get_attr(f"{self.node.target}.{name}") for name in names]


Apply = Callable[[], None]
Rewrite = Callable[[Place, random.Random], Apply | None]


def nodes_of(place: Place) -> list[fx.Node]:
    return [argument for argument in place.node.args if isinstance(argument, fx.Node)]

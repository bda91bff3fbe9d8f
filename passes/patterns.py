"""Patterns over graphs that look the same in every spelling: modules, functions, methods and operators.

A pattern is a value; `pattern.find(program)` yields a `Match` for each place where it fits.

    operation("relu", operation("linear", name="linear"), name="relu")
    module(nn.BatchNorm2d, module(nn.Conv2d, name="conv"), name="bn")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from ..compat import has_hooks
from ..tracing.dynamic import user_class
from .base import Site
from .operators import canonical_name, operator_of_module

if TYPE_CHECKING:
    from ..tracing.program import Program

__all__ = ["Match", "Pattern", "anything", "module", "operation"]


@dataclass(frozen=True)
class Match:
    """One place where a pattern fits.

    Attributes:
        program, home, variant: which graph it is in.
        nodes: name given in the pattern -> node.
    """

    program: Program
    home: str
    variant: int
    nodes: Mapping[str, fx.Node]

    def __getitem__(self, name: str) -> fx.Node:
        return self.nodes[name]

    def module(self, name: str) -> nn.Module:
        """Return the module that a matched module call calls."""
        return self.program.callee(self.home, self.nodes[name])

    def site(self, **options: Any) -> Site:
        """Return the site that consists of the named nodes."""
        return Site(
            self.program, self.home, {name: node.name for name, node in self.nodes.items()}, self.variant, **options
        )


@dataclass(frozen=True)
class Pattern:
    """What a node must be, and what its first operands must be.

    Attributes:
        operator: canonical operator name, in any spelling, a `torch.nn` leaf module's included.
        module_type: exact class (under fxopt's own subclass, if any) of a module that is called.
        operands: patterns of the first operands; what follows them is free.
        name: under which the match gives the node.
    """

    operator: str | None = None
    module_type: type[nn.Module] | None = None
    operands: tuple[Pattern, ...] = field(default=())
    name: str | None = None

    def find(self, program: Program) -> Iterator[Match]:
        """Yield every match in every captured graph, in execution order; matches may overlap."""
        for home, capture in program.captures.items():
            for variant, captured in enumerate(capture.variants):
                for node in captured.graph.nodes:
                    found: dict[str, fx.Node] = {}
                    if self.fits(node, program, home, found):
                        yield Match(program, home, variant, found)

    def fits(self, node: fx.Node, program: Program, home: str, found: dict[str, fx.Node]) -> bool:
        """Say whether the pattern fits at `node`; if so, `found` holds the named nodes."""
        if not self._is(node, program, home):
            return False
        sources = [source for source in node.args if isinstance(source, fx.Node)]
        if len(sources) < len(self.operands):
            return False
        if not all(p.fits(s, program, home, found) for p, s in zip(self.operands, sources, strict=False)):
            return False
        if self.name is not None:
            found[self.name] = node
        return True

    def _is(self, node: fx.Node, program: Program, home: str) -> bool:
        if self.operator is None and self.module_type is None:
            return True
        callee = program.callee(home, node) if node.op == "call_module" else None
        if self.module_type is not None:
            return callee is not None and _base(callee) is self.module_type
        if callee is None:
            return canonical_name(node) == self.operator
        return not has_hooks(callee) and operator_of_module(_base(callee)) == self.operator


def anything(*, name: str | None = None) -> Pattern:
    """Match any node."""
    return Pattern(name=name)


def operation(operator: str, *operands: Pattern, name: str | None = None) -> Pattern:
    """Match an operator in any spelling: `"linear"` fits `nn.Linear`, `F.linear` and `torch._C._nn.linear`."""
    return Pattern(operator=operator, operands=operands, name=name)


def module(module_type: type[nn.Module], *operands: Pattern, name: str | None = None) -> Pattern:
    """Match a call of a module of exactly this class."""
    return Pattern(module_type=module_type, operands=operands, name=name)


def _base(module: nn.Module) -> type:
    return user_class(type(module))

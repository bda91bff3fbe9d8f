"""Patterns over graphs that look the same in every spelling: modules, functions, methods and operators.

A pattern is a value; `program.matches(pattern)` yields a `Match` for each place where it fits.

    operation("relu", operation("linear", name="linear"), name="relu")
    module(nn.BatchNorm2d, module(nn.Conv2d, name="conv"), name="bn")
    operation("mul", anything(name="x"), operation("sigmoid", anything(name="x")))
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import fx, nn

from ...errors import CaptureError, expect
from ...runtime.values import user_class
from ...tracing.program import Program
from ..sites import Site
from .spelling import call_in, is_undisturbed

__all__ = ["Match", "Pattern", "anything", "either", "module", "operation"]


@dataclass(frozen=True)
class Match:
    """One place where a pattern fits, or what is known of it while the pattern is compared.

    Attributes:
        program, owner, specialization: which graph it is in.
        nodes: name given in the pattern -> node.
        values: name given in the pattern -> what else was found: a plain value, or what a called module holds.
        computed: the operations and module calls that the pattern stands for.
        pattern: what fits there.
        root: the node that the pattern as a whole stands for.
    """

    program: Program
    owner: str
    specialization: int
    pattern: Pattern
    root: fx.Node
    nodes: Mapping[str, fx.Node] = field(default_factory=dict[str, fx.Node])
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    computed: tuple[fx.Node, ...] = ()

    def __getitem__(self, name: str) -> fx.Node:
        return self.nodes[name]

    def module(self, name: str) -> nn.Module:
        """Return the module that a matched module call calls."""
        return self.program.callee(self.owner, self.nodes[name])

    def site(self, **options: Any) -> Site:
        """Return the site that consists of the named nodes."""
        names = {name: node.name for name, node in self.nodes.items()}
        options = {"is_there": _StillFits(self.pattern, self.root.name)} | options
        return Site(self.program, self.owner, names, self.specialization, **options)

    def called(self, name: str | None, node: fx.Node) -> Iterator[Match]:
        """Yield the same with a name for a node, unless another node has that name."""
        if name is None or self.nodes.get(name) is node:
            yield self
        elif name not in self.nodes:
            yield replace(self, nodes={**self.nodes, name: node})

    def holding(self, name: str, value: Any) -> Iterator[Match]:
        """Yield the same with a name for what is no node, unless something else has that name."""
        if name not in self.nodes and self.values.get(name, value) == value:
            yield replace(self, values={**self.values, name: value})

    def computed_by(self, name: str | None, node: fx.Node) -> Iterator[Match]:
        """Yield the same with an operation, and a name for it."""
        yield from replace(self, computed=(*self.computed, node)).called(name, node)

    @property
    def is_undisturbed(self) -> bool:
        """Say whether nothing is written between its first and its last operation."""
        return is_undisturbed(self.program, self.owner, self.computed)


@dataclass(frozen=True)
class _StillFits:
    """Say whether a pattern fits at a site as it did when it was found."""

    pattern: Pattern
    root: str

    def __call__(self, site: Site) -> bool:
        try:
            root = site.program.node(site.owner, self.root, site.specialization)
        except CaptureError:
            return False
        nodes = {label: site[label] for label in site.nodes}
        return any(found.nodes == nodes for found in self.pattern.at(site.program, site.owner, root))


@dataclass(frozen=True)
class Pattern:
    """What a node must be; by itself it fits every node.

    Where an operand or an argument is expected, a pattern may also be a plain value, which fits an equal one of the
    same type (`1` is not `1.0`), a list of patterns, which fits a list or tuple of as many values, or a slice of them.

    Attributes:
        name: under which the match gives the node; where a name is repeated, it has to be the same node.
    """

    name: str | None = None

    def find(self, program: Program) -> Iterator[Match]:
        """Yield one match for each node that it fits, in every captured graph, in execution order; they may overlap."""
        for owner, capture in program.captures.items():
            for number, specialization in enumerate(capture.specializations):
                for node in specialization.graph.nodes:
                    yield from itertools.islice(self.at(program, owner, node, number), 1)

    def at(self, program: Program, owner: str, node: fx.Node, specialization: int = 0) -> Iterator[Match]:
        """Yield a match for each way in which it fits one node.

        Where something is written between the first and the last operation of a match, there is none: what is read
        first and last may differ.
        """
        start = Match(program, owner, specialization, self, node)
        return (found for found in self.fits(node, start) if found.is_undisturbed)

    def fits(self, value: Any, found: Match) -> Iterator[Match]:
        """Yield what is found in every way in which the pattern fits a value, beside what was found already."""
        if isinstance(value, fx.Node):
            yield from found.called(self.name, value)


@dataclass(frozen=True)
class _Operation(Pattern):
    operator: str = ""
    operands: tuple[Any, ...] = ()
    arguments: tuple[tuple[str, Any], ...] = ()

    def fits(self, value: Any, found: Match) -> Iterator[Match]:
        call = call_in(found.program, found.owner, value, self.operator) if isinstance(value, fx.Node) else None
        if call is None or not all(name in call.named for name, _ in self.arguments):
            return
        expected = [*self.operands, *(pattern for _, pattern in self.arguments)]
        named = [call.named[name] for name, _ in self.arguments]
        for operands in call.orders:
            if len(self.operands) <= len(operands):
                values = [*operands[: len(self.operands)], *named]
                for inner in _all_fit(expected, values, found):
                    yield from inner.computed_by(self.name, value)


@dataclass(frozen=True)
class _ModuleCall(Pattern):
    module_type: type[nn.Module] = nn.Module
    operands: tuple[Any, ...] = ()

    def fits(self, value: Any, found: Match) -> Iterator[Match]:
        if not isinstance(value, fx.Node) or value.op != "call_module" or len(value.args) < len(self.operands):
            return
        if user_class(type(found.program.callee(found.owner, value))) is self.module_type:
            for inner in _all_fit(self.operands, value.args[: len(self.operands)], found):
                yield from inner.computed_by(self.name, value)


@dataclass(frozen=True)
class _Either(Pattern):
    alternatives: tuple[Any, ...] = ()

    def fits(self, value: Any, found: Match) -> Iterator[Match]:
        for alternative in self.alternatives:
            for inner in _fit(alternative, value, found):
                yield from inner.called(self.name, value) if isinstance(value, fx.Node) else (inner,)


def anything(*, name: str | None = None) -> Pattern:
    """Match any node."""
    return Pattern(name)


def operation(operator: str, *operands: Any, name: str | None = None, **arguments: Any) -> Pattern:
    """Match an operator in any spelling: `"linear"` fits `nn.Linear`, `F.linear` and `torch._C._nn.linear`.

    A call is compared with its arguments by name and defaults filled in; what the pattern does not mention is free. The
    first two operands of a commutative operator may be in either order. A call that writes in place fits where
    nothing else reads what it overwrites afterwards.

    Args:
        operator: canonical name, torch's own without namespace; of another operator of `torch.ops` "acme::swish".
        operands: patterns or plain values of the first parameters.
        name: under which the match gives the node.
        arguments: patterns or plain values of parameters by their names: `operation("gelu", approximate="none")`.
    """
    expect(operator, str, "operator", "its name, as 'relu' or 'acme::swish'")
    return _Operation(name, operator, operands, tuple(arguments.items()))


def module(module_type: type[nn.Module], *operands: Any, name: str | None = None) -> Pattern:
    """Match a call of a module of exactly this class."""
    expect(module_type, type, "module_type", "a class of modules")
    return _ModuleCall(name, module_type, operands)


def either(*alternatives: Any, name: str | None = None) -> Pattern:
    """Match what one of several patterns or plain values fits, the first one that does."""
    return _Either(name, alternatives)


def _fit(pattern: Any, value: Any, found: Match) -> Iterator[Match]:
    if isinstance(pattern, Pattern):
        yield from pattern.fits(value, found)
    elif isinstance(pattern, (list, tuple)):
        patterns = cast("list[Any]", pattern)
        if isinstance(value, (list, tuple)) and len(cast("list[Any]", value)) == len(patterns):
            yield from _all_fit(patterns, cast("list[Any]", value), found)
    elif isinstance(pattern, slice):
        if isinstance(value, slice):
            yield from _all_fit(_bounds(pattern), _bounds(value), found)
    elif type(value) is type(pattern) and value == pattern:
        yield found


def _bounds(piece: Any) -> list[Any]:
    return [piece.start, piece.stop, piece.step]


def _all_fit(patterns: Any, values: Any, found: Match) -> Iterator[Match]:
    if not patterns:
        yield found
        return
    for inner in _fit(patterns[0], values[0], found):
        yield from _all_fit(patterns[1:], values[1:], inner)

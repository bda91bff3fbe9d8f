"""Patterns from functions: what a spelling calls when it is traced, with casts looked through and numbers left open."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from ...errors import UsageError
from ...operators import canonical_name, normalized_arguments, operator_info
from ...passes.rewriting import Held, Match, Pattern, operation
from ...runtime.values import TensorMeta

__all__ = ["Spelled", "is_cast", "spelled", "tensor", "through", "uncast"]

_CASTS = frozenset(["to", "type", "type_as", "float", "double", "half", "bfloat16"])
_PLAIN = {"float": (int, float), "int": (int,), "str": (str,), "tuple": (tuple, list)}


@dataclass(frozen=True)
class Spelled:
    """A spelling as a pattern: operands by parameter, `settings` handed over besides, the `operator` of the result."""

    pattern: Pattern
    settings: Mapping[str, Any]
    operator: str | None


@cache
def spelled(spelling: Callable[..., Any]) -> Spelled:
    """Return a spelling as a pattern; a `UsageError` says that it calls what is no known operator."""
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    patterns: dict[fx.Node, Pattern] = {}
    settings: dict[str, Any] = {}
    given: dict[str, fx.Proxy] = {}
    for name, parameter in inspect.signature(spelling).parameters.items():
        if parameter.default is not parameter.empty:
            settings[name] = parameter.default
            continue
        kind = str(parameter.annotation if isinstance(parameter.annotation, str) else parameter.annotation.__name__)
        kinds = _PLAIN.get(kind.partition("[")[0])
        given[name] = fx.Proxy(graph.placeholder(name), tracer)
        patterns[given[name].node] = _Tensor(name) if kinds is None else _Plain(name, kinds)
    result = spelling(**given)
    if not isinstance(result, fx.Proxy):
        raise UsageError(f"the spelling {spelling.__qualname__} returns {type(result).__name__}, not a tensor")
    last = result.node
    while canonical_name(last) in _CASTS and isinstance(last.args[0], fx.Node):
        last = last.args[0]
    return Spelled(_pattern(result.node, patterns), settings, canonical_name(last))


def _pattern(value: Any, known: Mapping[fx.Node, Pattern]) -> Any:
    if isinstance(value, fx.Node):
        return known[value] if value in known else _operation(value, known)
    if isinstance(value, slice):
        piece = cast("Any", value)
        return slice(*(_pattern(each, known) for each in (piece.start, piece.stop, piece.step)))
    if isinstance(value, (tuple, list)):
        return [_pattern(each, known) for each in cast("list[Any]", value)]
    return _Number(None, value) if type(value) in (int, float) else value


def _operation(node: fx.Node, known: Mapping[fx.Node, Pattern]) -> Pattern:
    name = canonical_name(node)
    if name is None:
        raise UsageError(f"a spelling calls {node.target}, which is no known operator")
    if name in _CASTS:
        return _pattern(node.args[0], known)
    arguments = normalized_arguments(name, node.target, node.args, node.kwargs)
    named = {key: _pattern(value, known) for key, value in arguments.named.items() if key != "inplace"}
    exchanged = operator_info(name).commutative and arguments.given == 2
    first = list(named)[:2] if exchanged else []
    operands = [named.pop(key) for key in first]
    if not arguments.named:
        operands = [_pattern(value, known) for value in arguments.positional]
    return _Through(None, operation(name, *operands, **named))


# -- what operands are ---------------------------------------------------------------------------------------------


def through(computed: Pattern) -> Pattern:
    """Match what a pattern matches, whatever it is cast to."""
    return _Through(None, computed)


def tensor(name: str) -> Pattern:
    """Match any tensor, before it is cast."""
    return _Tensor(name)


@dataclass(frozen=True)
class _Through(Pattern):
    """What is computed, whatever it is cast to."""

    computed: Pattern | None = None

    def fits(self, value: Any, found: Match) -> Iterator[Match]:
        node, found = _looked_through(value, found)
        if isinstance(node, fx.Node) and self.computed is not None:
            yield from self.computed.fits(node, found)


@dataclass(frozen=True)
class _Tensor(Pattern):
    """Any tensor, before it is cast; also one that a called module holds, or none."""

    def fits(self, value: Any, found: Match) -> Iterator[Match]:
        node, found = _looked_through(value, found)
        if isinstance(node, fx.Node):
            yield from found.called(self.name, node)
        elif node is None or isinstance(node, Held):
            yield from found.holding(str(self.name), node)


@dataclass(frozen=True)
class _Plain(Pattern):
    """Any plain value of some types."""

    kinds: tuple[type, ...] = ()

    def fits(self, value: Any, found: Match) -> Iterator[Match]:
        is_plain = isinstance(value, self.kinds) and not isinstance(value, bool)
        if is_plain and not any(isinstance(item, fx.Node) for item in _items(value)):
            yield from found.holding(str(self.name), value)


@dataclass(frozen=True)
class _Number(Pattern):
    """A number, integral or not; a list of this one says the same of dimensions."""

    number: float = 0.0

    def fits(self, value: Any, found: Match) -> Iterator[Match]:
        items = _items(value)
        one = items[0] if len(items) == 1 else value
        if type(one) in (int, float) and one == self.number:
            yield found


def _items(value: Any) -> list[Any]:
    return list(cast("tuple[Any, ...]", value)) if isinstance(value, (tuple, list)) else []


# -- casts ---------------------------------------------------------------------------------------------------------


def is_cast(node: fx.Node) -> bool:
    """Say whether a node only turns floating-point numbers into those of another, or the same, dtype."""
    if canonical_name(node) not in _CASTS or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, TensorMeta) or not isinstance(after, TensorMeta):
        return False
    return before.dtype.is_floating_point and after.dtype.is_floating_point and before.device == after.device


def uncast(value: Any) -> Any:
    """Return what a value was before it was cast."""
    while isinstance(value, fx.Node) and is_cast(value):
        value = value.args[0]
    return value


def _looked_through(value: Any, found: Match) -> tuple[Any, Match]:
    while isinstance(value, fx.Node) and is_cast(value):
        (found,) = found.computed_by(None, value)
        value = value.args[0]
    return value, found

"""Trace a call as it went: what its data decided is decided as it was, and a loop over them becomes its rounds."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from torch import Tensor, fx, nn

from ...operators import canonical_name, upwards
from ...runtime.values import copied, user_class
from ..proxies import ValueProxy
from ..reads import source_of
from .decisions import Decisions, Pending
from .tracer import ModuleTracer

__all__ = ["Decided", "UnrollingTracer"]

_COMPARISONS = ("eq", "ne", "gt", "ge", "lt", "le")
_EMPTY = {("eq", 0), ("ne", 0), ("gt", 0), ("le", 0), ("lt", 1), ("ge", 1)}
_MIRRORED = {"gt": "lt", "lt": "gt", "ge": "le", "le": "ge"}
_SAME = ("not_", "bool", "item", "int", "squeeze", "view", "reshape", "to", "select", "getitem", "flatten", "unsqueeze")
_COUNTS = ("numel", "len", "size", "shape", "sum", "count_nonzero", "bincount", "histc", "cumsum", "diff")


@dataclass(frozen=True)
class Decided:
    """What a forward decided by data, where, and from which nodes. It asked whether there is anything (`numel() == 0`,
    `any()`, of floats that were `compared`), which number something has, how many there are (compared with a `limit`: a
    node or a number), or for other values.
    """

    kind: Literal["emptiness", "number", "size", "value"]
    place: str
    uses: frozenset[fx.Node]
    compared: fx.Node | None = None
    limit: fx.Node | int | None = None


class UnrollingTracer(ModuleTracer):
    """Trace a call as it went, through calls of `opened` children; the graph holds for the numbers in it only. `seen`
    has the value of each node in that call, but for nodes, by name, whose values are `overwritten`.
    """

    opened: frozenset[nn.Module] = frozenset()
    overwritten: Mapping[str, Tensor] = {}

    @property
    def forward(self) -> Callable[..., Any]:
        """Return the forward that the user wrote, under what was wrapped around it."""
        return inspect.unwrap(user_class(type(self.module)).forward)

    def opens(self, child: nn.Module) -> bool:
        return child in self.opened

    def _decisions(self) -> Decisions:
        self.seen: dict[fx.Node, Any] = {}
        self.decided: list[Decided] = []
        return _Answers(self)

    def _proxy(self, node: fx.Node, value: Any) -> ValueProxy:
        value = self.overwritten.get(node.name, value)
        proxy = super()._proxy(node, value)
        changes = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        self.seen[node] = copied(value) if changes else value
        return proxy

    def note_decided(self, node: fx.Node, *, plain: bool, place: str | None = None) -> None:
        """Note that the value of a node decided something, or was turned into a plain number that may."""
        with self.session.suspended():
            value, kind = _asked(node, self.seen)
            if plain and kind == "emptiness":
                kind = "size"
            found = _compared(value, self.seen) if kind == "emptiness" else None
            limit = _limit(node, self.data.shaped) if kind == "size" else None
        self.decided.append(Decided(kind, place or source_of(), frozenset(upwards(node)), found, limit))


class _Answers(Decisions):
    """Answer what hangs on data as it was, and keep no guard of it."""

    _tracer: UnrollingTracer

    def truth(self, proxy: ValueProxy) -> bool:
        if not self._hangs_on_data(proxy):
            return super().truth(proxy)
        self._tracer.note_decided(proxy.node, plain=False)
        return self._as_it_was(proxy, bool)

    def plain(self, proxy: ValueProxy, source: str | None = None) -> Any:
        if not self._hangs_on_data(proxy):
            return super().plain(proxy, source)
        self._tracer.note_decided(proxy.node, plain=True, place=source)
        return self._as_it_was(proxy, _plain)

    def text(self, proxy: ValueProxy, spec: str) -> str:
        if not self._hangs_on_data(proxy):
            return super().text(proxy, spec)
        return self._as_it_was(proxy, lambda value: format(value, spec))

    def index(self, proxy: ValueProxy, frame: FrameType) -> int:
        if not isinstance(proxy.fxopt_value, Tensor) and not self._hangs_on_data(proxy):
            return super().index(proxy, frame)
        self._pending.append(Pending(proxy, frame, frame.f_lasti, source_of()))
        return self._as_it_was(proxy, operator.index)

    def _assume_length(self, proxy: ValueProxy, count: int) -> None:
        if not self._tracer.data.decides(self._length(proxy)):
            super()._assume_length(proxy, count)

    def _as_it_was(self, proxy: ValueProxy, ask: Callable[[Any], Any]) -> Any:
        value = self._known(proxy)
        with self._tracer.session.suspended():
            return ask(value)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _asked(
    node: fx.Node, seen: Mapping[fx.Node, Any]
) -> tuple[fx.Node, Literal["emptiness", "number", "size", "value"]]:
    """Return what a decision is about, and what it asks of that."""
    while canonical_name(node) in ("not_", "bool", "logical_not") and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    name = canonical_name(node)
    if name in _COMPARISONS and len(node.args) == 2:
        left, right = node.args
        if not isinstance(left, fx.Node):
            left, right, name = right, left, _MIRRORED.get(name, name)
        if not isinstance(left, fx.Node):
            return node, "value"
        if (name, right) in _EMPTY and _is_count(left, seen):
            return left, "emptiness"
        if name in ("eq", "ne") and _is_whole(left, seen) and not _is_count(left, seen):
            return left, "number"
        return left, "size" if _is_count(left, seen) else "value"
    if name == "any" or _is_count(node, seen):
        return node, "emptiness"
    return node, "number" if _is_whole(node, seen) else "value"


def _is_whole(node: fx.Node, seen: Mapping[fx.Node, Any]) -> bool:
    """Say whether a value is a whole number, or a tensor of them."""
    value = seen.get(node)
    if isinstance(value, Tensor):
        return not value.is_floating_point() and not value.is_complex()
    return type(value) is int


def _is_count(node: fx.Node, seen: Mapping[fx.Node, Any]) -> bool:
    """Say whether a whole number says how many there are: it was counted, or computed from what was."""
    pending, met = [node], set[fx.Node]()
    while pending:
        one = pending.pop()
        name = canonical_name(one)
        if name in _COUNTS or (one.target is getattr and one.args[1] == "shape"):
            return True
        goes_on = name in _SAME or (type(seen.get(one)) is int and one.op == "call_function") or name == "tolist"
        if goes_on and one not in met:
            met.add(one)
            inputs = one.all_input_nodes
            pending += inputs[:1] if name in _SAME else inputs
    return False


def _compared(node: fx.Node, seen: Mapping[fx.Node, Any]) -> fx.Node | None:
    """Return the comparison of floats whose answers were counted, or asked for any."""
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        if canonical_name(node) in _COMPARISONS:
            floats = (seen.get(used) for used in node.all_input_nodes)
            return node if any(isinstance(value, Tensor) and value.is_floating_point() for value in floats) else None
    return None


def _limit(node: fx.Node, shaped: Collection[fx.Node]) -> fx.Node | int | None:
    """Return what a comparison compares the size of something shaped by data with, where that is not."""
    if canonical_name(node) not in _MIRRORED or len(node.args) != 2:
        return None
    sides = [isinstance(each, fx.Node) and any(used in shaped for used in upwards(each)) for each in node.args]
    limit = node.args[sides.index(False)] if sides.count(True) == 1 else None
    return limit if type(limit) is int or isinstance(limit, fx.Node) else None

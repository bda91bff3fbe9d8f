"""What traced code decides by a value becomes a guard: over the arguments if it can be, else inside the graph."""

from __future__ import annotations

import dis
import itertools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, NoReturn, cast

from torch import Tensor, fx

from ...runtime.guards import (
    Applied,
    Attribute,
    Guard,
    IsNot,
    Source,
    Tally,
    Truth,
    equal,
    is_switch,
    is_tensor,
    key_of,
    require,
    source_of_node,
    type_of,
)
from ..proxies import UNKNOWN, Tracer, ValueProxy, proxies_in
from ..reads import condition_of, source_of, user_frame

__all__ = ["BY_DATA", "Decisions", "Messages", "Pending"]


BY_DATA = "its control flow depends on the data in a tensor"
_MOST_BY_DATA = 8
"""A forward that decides more often (it loops, say) is not unrolled."""


class _Text(NamedTuple):
    proxy: ValueProxy
    frame: FrameType
    line: int
    source: str


class Messages:
    """Know which texts of values were asked for: those in the message of a check decide nothing."""

    def __init__(self) -> None:
        self._unread: list[_Text] = []

    def note(self, proxy: ValueProxy, frame: FrameType, source: str) -> None:
        """Note that the text of a value was asked for by `frame`, which stands in the line `source`."""
        self._unread.append(_Text(proxy, frame, frame.f_lineno, source))

    def close(self, frame: FrameType | None) -> None:
        """Note that `frame` calls a check: the texts that the arguments in this call are made of are nobody else's."""
        if frame is not None:
            self._unread = [text for text in self._unread if text.frame is not frame or not _is_in_call(text, frame)]

    def take_read(self) -> list[tuple[ValueProxy, str]]:
        """Return, once, the values whose texts were asked for by something else than a check, with the lines."""
        read, self._unread = self._unread, []
        return [(text.proxy, text.source) for text in read]


@dataclass
class Pending:
    """A proxy that was asked for a plain integer, by Python or by torch's argument parser: which, shows later."""

    proxy: ValueProxy
    frame: FrameType
    instruction: int
    source: str


class Decisions:
    """Answer the questions that decide something, and keep each answer as a guard. `flags`: switches (`self.training`)
    with their answers. Of the `require` nodes, `structural` ones check how a value is built, those `by_data` what data
    decide.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.messages = Messages()
        self.guards: dict[Guard, None] = {}
        self.flags: dict[Source, bool] = {}
        self.structural: set[fx.Node] = set()
        self.by_data: set[fx.Node] = set()
        self._tracer = tracer
        self._pending: list[Pending] = []
        self._lengths: dict[fx.Node, fx.Node] = {}

    def truth(self, proxy: ValueProxy) -> bool:
        """Answer `bool(proxy)`."""
        value = self._known(proxy)
        with self._tracer.session.aside():
            answer = bool(value)
        if self._hangs_on_data(proxy):
            self._check_data(proxy, answer)
        else:
            self._assume(proxy.node, answer, truth=True)
        return answer

    def plain(self, proxy: ValueProxy, source: str | None = None) -> Any:
        """Return the plain value of a proxy; the graph holds for this value only."""
        value = self._value(proxy, source)
        if isinstance(value, Tensor):
            self._tracer.fail("it turns a tensor into a plain value")
        self._assume(proxy.node, value, source=source)
        return value

    def text(self, proxy: ValueProxy, spec: str) -> str:
        """Answer `format(proxy, spec)`; what it decides is seen in the end."""
        frame, value = user_frame(), self._known(proxy)
        if frame is None:
            return format(self.plain(proxy), spec)
        self.messages.note(proxy, frame, source_of())
        with self._tracer.session.aside():
            return format(value, spec)

    def index(self, proxy: ValueProxy, frame: FrameType) -> int:
        """Answer a use of a proxy as a plain integer."""
        value = proxy.fxopt_value
        if value is UNKNOWN or isinstance(value, Tensor):
            raise TypeError(f"tracing needs the value of {proxy.node.name} as a plain integer")
        answer = operator.index(value)
        self._pending.append(Pending(proxy, frame, frame.f_lasti, source_of()))
        return answer

    def forget_index(self, arguments: Any) -> None:
        """Drop the questions that torch's argument parser asked: the call itself arrives now, with the proxies."""
        if not self._pending:
            return
        given = {proxy.node for proxy in proxies_in(arguments)}
        self._pending = [p for p in self._pending if p.proxy.node not in given or not _is_running(p)]

    def settle(self) -> None:
        """Turn the integers that Python itself asked for, and the texts that are no mere messages, into guards."""
        for proxy, source in self.messages.take_read():
            if self._hangs_on_data(proxy):
                self._tracer.fail(BY_DATA, source)
            self.plain(proxy, source)
        for pending in self._pending:
            self.plain(pending.proxy, pending.source)
        self._pending.clear()

    def length(self, proxy: ValueProxy) -> int:
        """Answer `len(proxy)`."""
        if proxy.fxopt_value is UNKNOWN:
            self._tracer.fail("it needs the length of a value that only example inputs can give")
        with self._tracer.session.aside():
            count = len(proxy.fxopt_value)
        self._assume_length(proxy, count)
        return count

    def iterate(self, proxy: ValueProxy, frame: FrameType) -> Iterator[Any]:
        """Answer an iteration or unpacking, item by item."""
        value = proxy.fxopt_value
        if value is UNKNOWN:
            count = _unpacked(frame)
            if count is None:
                self._tracer.fail("it iterates over a value that only example inputs can give")
            self._assume_length(proxy, count)
            return iter([proxy.fxopt_item(i) for i in range(count)])
        if isinstance(value, Mapping):
            return iter(self.keys(proxy))
        if isinstance(value, str):
            return iter(self.plain(proxy))
        if not isinstance(value, (Tensor, Sequence)):
            self._tracer.fail(f"it iterates over a {type(value).__name__}")
        return iter([proxy.fxopt_item(i) for i in range(self.length(proxy))])

    def keys(self, proxy: ValueProxy) -> list[Any]:
        """Answer which keys a mapping has."""
        return self.plain(self._tracer.create_proxy("call_function", list, (proxy,), {}))

    def contains(self, proxy: ValueProxy, item: Any) -> bool:
        """Answer `item in proxy`."""
        return self.truth(self._tracer.create_proxy("call_function", operator.contains, (proxy, item), {}))

    def kind(self, node: fx.Node, value: Any, kinds: Any) -> None:
        """Note that it mattered what kind of value an argument is."""
        argument, reason = self._tracer.places[node.name], f"decided at {source_of()}"
        if kinds is Tensor:
            self._keep(is_tensor(argument, isinstance(value, Tensor), reason))
        else:
            self._keep(equal(Attribute(type_of(argument), "__name__"), type(value).__name__, reason))

    def assume_tensor(self, proxy: ValueProxy) -> None:
        """Let the graph hold where an argument is a tensor; of what is computed only an example could tell."""
        if proxy.node.op == "placeholder":
            self._keep(is_tensor(self._tracer.places[proxy.node.name], True, f"decided at {source_of()}"))
        elif proxy.node.op != "get_attr":
            self._known(proxy)

    def absent(self, node: fx.Node) -> None:
        """Note that a value is None, which no proxy can stand for."""
        self._assume(node, None, structural=True)

    def kind_read(self, proxy: ValueProxy) -> None:
        """Note that it mattered what kind of value was read of an object."""
        kind = self._tracer.create_proxy("call_function", type, (proxy,), {})
        self.plain(self._tracer.create_proxy("call_function", getattr, (kind, "__qualname__"), {}))

    def missing(self, proxy: ValueProxy, name: str) -> NoReturn:
        """Note that a value has no attribute called `name`, and raise AttributeError as it does."""
        if self._tracer.data.is_object(proxy.node):
            self.truth(self._tracer.create_proxy("call_function", hasattr, (proxy, name), {}))
        raise AttributeError(f"{type(proxy.fxopt_value).__name__!r} object has no attribute {name!r}")

    def present(self, node: fx.Node, place: str, *, lifted: bool = False) -> bool:
        """Note that a value is not None; with `lifted` only if that can be asked before the forward starts."""
        source = self._lifted(node)
        if source is not None:
            if isinstance(source, Attribute):
                source = Applied(getattr, (source.owner, key_of(source.name), key_of(None)))
            self._keep(Guard(source, IsNot(key_of(None)), f"decided at {place}"))
            return True
        if lifted:
            return False
        with self._tracer.graph.inserting_after(node):
            answer = self._tracer.graph.call_function(operator.is_not, (node, None))
        self._require(answer, True, place, structural=True)
        return True

    @property
    def read_later(self) -> Collection[fx.Node]:
        """Return the values that hang on what was read of objects after they had been changed."""
        return self._tracer.data.later

    def _keep(self, guard: Guard | None) -> bool:
        """Keep a guard, if there is one, and say whether there is."""
        if guard is not None:
            self.guards.setdefault(guard)
        return guard is not None

    def _lifted(self, node: fx.Node) -> Source | None:
        """Return where a value is in the forward's arguments, as they are when it starts, or None."""
        if not self._tracer.liftable or node in self.read_later:
            return None
        return source_of_node(node, self._tracer.places)

    def _value(self, proxy: ValueProxy, source: str | None) -> Any:
        value = self._known(proxy)
        if self._hangs_on_data(proxy):
            self._tracer.fail(BY_DATA, source)
        return value

    def _known(self, proxy: ValueProxy) -> Any:
        if proxy.fxopt_value is UNKNOWN:
            self._tracer.fail("its control flow depends on a value that only example inputs can give")
        return proxy.fxopt_value

    def _hangs_on_data(self, proxy: ValueProxy) -> bool:
        data, is_tensor = self._tracer.data, isinstance(proxy.fxopt_value, Tensor)
        return data.decides(proxy.node) or (is_tensor and not data.is_made(proxy.node))

    def _check_data(self, proxy: ValueProxy, answer: bool) -> None:
        """Let the graph ask again, at this place: a tensor may be changed in place later."""
        if len(self.by_data) == _MOST_BY_DATA:
            self._tracer.fail(f"{BY_DATA} more than {_MOST_BY_DATA} times")
        is_tensor = isinstance(proxy.fxopt_value, Tensor)
        asked = self._tracer.create_proxy("call_function", bool, (proxy,), {}) if is_tensor else proxy
        node, place = asked.node, source_of()
        reason = f"{condition_of()} (at {place}) depends on data, and was {answer} at capture"
        check = self._tracer.graph.call_function(require, (node, answer, reason, True, cast("Any", Tally())))
        check.meta.update(val=None, source=place)
        self.by_data.add(check)

    def _assume_length(self, proxy: ValueProxy, count: int) -> None:
        if self._tracer.data.is_fixed(proxy.node):
            return
        if self._tracer.data.decides(self._length(proxy)):
            self._tracer.fail(BY_DATA)
        self._assume(self._length(proxy), count, structural=True)

    def _length(self, proxy: ValueProxy) -> fx.Node:
        node = self._lengths.get(proxy.node)
        if node is None:
            node = self._lengths[proxy.node] = self._tracer.create_proxy("call_function", len, (proxy,), {}).node
        return node

    def _assume(
        self, node: fx.Node, value: Any, *, truth: bool = False, structural: bool = False, source: str | None = None
    ) -> None:
        place = source_of() if source is None else source
        lifted, reason = self._lifted(node), f"decided at {place}" if place else "decided in forward"
        guard = None
        if lifted is not None:
            guard = Guard(lifted, Truth(bool(value)), reason) if truth else equal(lifted, value, reason)
        if lifted is None or not self._keep(guard):
            self._require(node, value, place, structural=structural, given=source is not None)
        elif is_switch(lifted):
            self.flags[lifted] = bool(value)

    def _require(self, node: fx.Node, value: Any, place: str, *, structural: bool, given: bool = False) -> None:
        if any(user.target is require and user.args[1] == value for user in node.users):
            return
        asks = f"the control flow at {place}" if given else f"{condition_of()} (at {place})"
        reason = f"{asks} finds {value!r}"
        graph = self._tracer.graph
        with graph.inserting_after(node):
            check = graph.call_function(require, (node, self._tracer.constant(value), reason, True))
        check.meta.update(val=None, source=place)
        if structural:
            self.structural.add(check)


def _is_running(pending: Pending) -> bool:
    """Tell whether the instruction that asked is the one being run."""
    frame = user_frame()
    while frame is not None:
        if frame is pending.frame:
            return frame.f_lasti == pending.instruction
        frame = frame.f_back
    return False


def _unpacked(frame: FrameType) -> int | None:
    """Return how many names an unpacking assignment (`b, t = x.shape`) in `frame` fills, if that is what runs."""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            return instruction.argval if instruction.opname == "UNPACK_SEQUENCE" else None
    return None


def _is_in_call(text: _Text, frame: FrameType) -> bool:
    """Tell whether a text was asked for in the lines of the call that `frame` is making."""
    line, end_line, *_ = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return line is not None and end_line is not None and line <= text.line <= end_line

"""Follow the contexts that a forward opens, and cut what stands under them out into regions of their own.

While a forward is traced, marks in the graph say where a context was opened and closed. What stands between two marks,
in the order in which it was recorded, becomes the graph of a region; reads of tensors and modes stay at owner, and are
handed in.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from ...runtime.graphs import Capture, Context, ContextRegion, RegionPlan, Specialization
from ...runtime.guards import require
from ...runtime.values import Signature
from ..proxies import Tracer, ValueProxy
from ..reads import source_of

__all__ = ["OpenContexts", "closed", "mark", "opened", "with_regions"]


def opened() -> None:
    """Mark where a context was opened; no graph that runs holds this."""


def closed() -> None:
    """Mark where a context was closed; no graph that runs holds this."""


def mark(graph: fx.Graph, context: Context | None) -> None:
    """Mark the end of `graph` as the place where a context was opened, or for None where the last one was closed."""
    node = graph.call_function(closed if context is None else opened)
    node.meta["context"] = context


@dataclass
class _Span:
    """What was recorded under a context, itself holding spans."""

    context: Context | None
    items: list[fx.Node | _Span] = field(default_factory=list["fx.Node | _Span"])

    def nodes(self) -> Iterator[fx.Node]:
        for item in self.items:
            if isinstance(item, _Span):
                yield from item.nodes()
            else:
                yield item

    def inputs(self) -> list[fx.Node]:
        """Return what the nodes inside read from outside."""
        inside = set(self.nodes())
        return list(dict.fromkeys(s for node in self.nodes() for s in node.all_input_nodes if s not in inside))

    def results(self) -> list[fx.Node]:
        """Return the nodes inside that something outside reads."""
        inside = set(self.nodes())
        return [node for node in self.nodes() if any(user not in inside for user in node.users)]

    def detaches(self) -> bool:
        """Tell whether no gradient can pass the whole span."""
        inner = [item for item in self.items if isinstance(item, _Span)]
        if self.context is not None and self.context.gradients is False:
            return not any(span.attaches() for span in inner)
        return False

    def attaches(self) -> bool:
        """Tell whether gradients are switched on somewhere inside."""
        inner = [item for item in self.items if isinstance(item, _Span)]
        return (self.context is not None and self.context.gradients is True) or any(s.attaches() for s in inner)


def with_regions(
    module: nn.Module, specializations: Sequence[Specialization]
) -> tuple[list[Specialization], dict[str, RegionPlan]]:
    """Return a module's graphs with calls of regions where they had marks, and the regions by their names."""
    plans: dict[str, RegionPlan] = {}
    cut = [
        _Cutter(module, plans).cut(v) if v.graph.find_nodes(op="call_function", target=opened) else v
        for v in specializations
    ]
    return cut, plans


@dataclass
class _Body:
    """A graph under way, the regions that it calls, and its nodes by those that were traced."""

    plans: dict[str, RegionPlan]
    values: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    graph: fx.Graph = field(default_factory=fx.Graph)


class _Cutter:
    """Write one graph of a module anew, and add the regions that it calls to `plans`."""

    def __init__(self, module: nn.Module, plans: dict[str, RegionPlan]) -> None:
        self._module = module
        self._plans = plans

    def cut(self, specialization: Specialization) -> Specialization:
        """Return the graph of the owner, which calls the regions."""
        owner = _Body(self._plans)
        self._write(_root(specialization.graph), owner)
        return dataclasses.replace(specialization, graph=owner.graph)

    def _write(self, span: _Span, body: _Body) -> None:
        """Write a span's own nodes into `body`, and calls of regions for the spans in it."""
        for item in span.items:
            if isinstance(item, _Span):
                self._write_region(item, body)
                continue
            body.values[item] = body.graph.node_copy(item, body.values.__getitem__)

    def _write_region(self, span: _Span, outer: _Body) -> None:
        if span.context is None or next(span.nodes(), None) is None:
            return
        name = self._free_name(span.context.kind, outer)
        region = _Body({})
        results = span.results()
        for source in span.inputs():
            region.values[source] = placeholder = region.graph.placeholder(source.name)
            placeholder.meta = dict(source.meta)
        names = [node.name for node in region.graph.nodes]
        self._write(span, region)
        outputs = tuple(region.values[node] for node in results)
        region.graph.output(outputs[0] if len(outputs) == 1 else outputs)
        called = dict.fromkeys(str(node.target) for node in span.nodes() if node.op == "call_module")
        capture = Capture(
            ContextRegion, [Specialization((), region.graph)], Signature.of_names(names), regions=region.plans
        )
        outer.plans[name] = RegionPlan(span.context, capture, tuple(called))
        _write_call(name, span, results, outer)

    def _free_name(self, kind: str, body: _Body) -> str:
        number = 0
        while f"{kind}_{number}" in body.plans or hasattr(self._module, f"{kind}_{number}"):
            number += 1
        return f"{kind}_{number}"


def _write_call(name: str, span: _Span, results: Sequence[fx.Node], body: _Body) -> None:
    """Write the call of a region, and what picks its results apart."""
    values = body.values
    call = body.graph.call_module(name, tuple(values[source] for source in span.inputs()))
    call.meta.update(
        source=next(span.nodes()).meta.get("source", ""),
        val=tuple(node.meta.get("val") for node in results),
        context=span.context,
        region=True,
        detached=span.detaches(),
        checks=any(node.target is require for node in span.nodes()),
        draws=min((node.meta["draws"] for node in span.nodes() if "draws" in node.meta), default=""),
    )
    if len(results) == 1:
        values[results[0]] = call
        call.meta["val"] = results[0].meta.get("val")
        return
    for position, node in enumerate(results):
        values[node] = item = body.graph.call_function(operator.getitem, (call, position))
        item.meta = {key: node.meta[key] for key in ("val", "source") if key in node.meta}


def _root(graph: fx.Graph) -> _Span:
    """Return the nodes of a graph without its marks, span by span; reads of attributes go before what needs them."""
    stack = [_Span(None)]
    for node in graph.nodes:
        if node.target is opened:
            span = _Span(node.meta["context"])
            stack[-1].items.append(span)
            stack.append(span)
        elif node.target is closed:
            stack.pop()
        elif node.op == "get_attr" and len(stack) > 1:
            stack[0].items.insert(-1, node)
        else:
            stack[-1].items.append(node)
    return stack[0]


class _Open(NamedTuple):
    key: object
    context: Context
    source: str
    undo: Callable[[], None] | None


class OpenContexts:
    """Know which contexts are open at the place in a forward that is being traced, and whether any was `used`."""

    def __init__(self, tracer: Tracer) -> None:
        self.used = False
        self._tracer = tracer
        self._open: list[_Open] = []

    def enter(self, key: object, context: Context, undo: Callable[[], None] | None = None) -> None:
        """Note that `key`, a context manager, opens a context; `undo` closes it where the forward never does."""
        self.used = True
        self._open.append(_Open(key, context, source_of(), undo))
        mark(self._tracer.graph, context)

    def leave(self, key: object, error: object = None) -> None:
        """Note that `key` closes its context, perhaps because of an error; give up if it is not the last one opened."""
        place = next((i for i, entry in reversed(list(enumerate(self._open))) if entry.key is key), None)
        entry = None if place is None else self._open.pop(place)
        if self._tracer.failure is not None:
            return
        if entry is None or place != len(self._open):
            self._tracer.fail("it does not close contexts in the order in which it opened them")
        mark(self._tracer.graph, None)
        if error is not None:
            self._tracer.give_up(f"an exception leaves {entry.context.kind}")

    def close(self) -> None:
        """Close what the forward left open."""
        while self._open:
            undo = self._open.pop().undo
            if undo is not None:
                undo()

    def check(self) -> None:
        """Give up unless everything was closed."""
        if self._open:
            last = self._open[-1]
            self._tracer.fail(f"it leaves {last.context.kind} switched on when it returns", last.source)

    def knows(self, question: str, args: tuple[Any, ...]) -> bool | None:
        """Return what torch's function named `question` answers if the open contexts decide it, or None."""
        for entry in reversed(self._open):
            context, settings = entry.context, entry.context.settings
            if question == "is_grad_enabled" and context.gradients is not None:
                return context.gradients
            if question == "is_inference_mode_enabled" and context.kind == "inference_mode":
                return bool(settings["mode"])
            if question == "is_autocast_enabled" and settings.get("device_type") == (args[0] if args else "cuda"):
                with self._tracer.session.suspended():
                    return torch.is_autocast_enabled(settings["device_type"])
        return None

    def plain(self, value: Any) -> Any:
        """Return what a proxy stands for, as a decision; other values as they are."""
        return self._tracer.decisions.plain(value) if issubclass(type(value), ValueProxy) else value

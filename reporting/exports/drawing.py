"""A picture as nodes with edges, in groups by module: what formats can draw that do not know how models are nested."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...runtime.values import qualified
from ..picture import NOW

__all__ = ["Drawn", "Group", "Side", "grouped", "sides_of"]

_NUMBER = re.compile(r"#\d+\Z")

_Graph = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Drawn:
    """A node with what is known of it.

    Attributes:
        id: the graph and the node, as `encoder.0/linear`; unique on its side.
        scope: the names of the modules that it is in, from the outermost.
        label: what it computes.
        value: type and shape of what it gave, or "".
        inputs: ids of the nodes that it reads.
        made_by: the pass that made it, or "".
        attributes: everything else that is known, in words.
        cost: microseconds, operations and bytes of one run; empty where they were not measured.
        opens: whether it calls a module whose own nodes are drawn, so that these have its cost once more.
    """

    id: str
    scope: tuple[str, ...]
    label: str
    value: str
    inputs: tuple[str, ...]
    made_by: str
    attributes: dict[str, str]
    cost: tuple[float, ...] = ()
    opens: bool = False


@dataclass
class Group:
    """A module: its nodes, and the modules in it by name."""

    title: str
    nodes: list[Drawn] = field(default_factory=list[Drawn])
    groups: dict[str, Group] = field(default_factory=dict[str, "Group"])


@dataclass(frozen=True)
class Side:
    """The whole model at one stage: `model`, or `before` and `after` where passes have rewritten it."""

    name: str
    nodes: list[Drawn]
    classes: dict[str, str]
    """Name of a module -> its class."""


def sides_of(picture: Mapping[str, Any]) -> list[Side]:
    """Return what a picture shows, as a list of one side or two."""
    if not picture["passes"]:
        return [_Reader(picture, 1).side("model")]
    return [_Reader(picture, number).side(name) for number, name in enumerate(("before", "after"))]


def grouped(side: Side) -> Group:
    """Return the nodes of a side in groups, as the modules that they are in are nested."""
    root = Group(f"{side.name}: {side.classes.get('', '')}")
    for node in side.nodes:
        group = root
        for depth, name in enumerate(node.scope, 1):
            path = _module(".".join(node.scope[:depth]))
            title = f"{name}: {side.classes[path]}" if path in side.classes else name
            group = group.groups.setdefault(name, Group(title))
        group.nodes.append(node)
    return root


class _Reader:
    """Reads one side of a picture: number 0 is what was there before all passes, 1 what is there now."""

    def __init__(self, picture: Mapping[str, Any], number: int) -> None:
        history: Mapping[str, Sequence[tuple[int, int]]] = picture["history"]
        chosen = {name: versions[0][1] if number == 0 else dict(versions).get(NOW, -1)
                  for name, versions in history.items() if versions}  # fmt: skip
        self._graphs: dict[str, _Graph] = {
            name: picture["graphs"][place] for name, place in chosen.items() if place >= 0
        }
        self._opaque = {name for name, _, _ in picture["opaque"]}
        self._classes = {name: sides[number][0] for name, sides in picture["modules"].items() if sides[number]}
        self._costs: Mapping[str, Mapping[str, Sequence[float]]] = (
            (picture["costs"] or {}).get(("before", "after")[number], {}).get("nodes", {})
        )
        self._entered: dict[str, str] = {}
        """Name of a graph -> id of the first call of its module, which stands for all."""

    def side(self, name: str) -> Side:
        shown = list(self._shown())
        nodes = [self._drawn(graph, row) for graph in shown for row in self._graphs[graph]]
        return Side(name, nodes, self._classes)

    def _shown(self) -> Iterator[str]:
        """Yield the graphs that run: those of the outermost modules and of what they call, and those in opaque ones."""
        waiting = [name for name in self._graphs if _module(name) == name and self._begins(name)][::-1]
        while waiting:
            name = waiting.pop()
            variants = [each for each in self._graphs if each != name and _module(each) == name]
            shown = (name, *variants)
            yield from shown
            called = [self._enter(graph, row) for graph in shown for row in self._graphs[graph]]
            waiting += [each for each in reversed(called) if each is not None]

    def _begins(self, name: str) -> bool:
        parts = name.split(".")
        above = [".".join(parts[:depth]) for depth in range(len(parts))] if name else []
        nearest = next((each for each in reversed(above) if each in self._graphs or each in self._opaque), None)
        return nearest is None or nearest not in self._graphs

    def _enter(self, graph: str, row: Sequence[Any]) -> str | None:
        """Return the graph that a node calls for the first time."""
        called = _called(graph, row)
        if called not in self._graphs or called in self._entered:
            return None
        self._entered[called] = f"{graph}/{row[0]}"
        return called

    def _drawn(self, graph: str, row: Sequence[Any]) -> Drawn:
        name, op, target, _, value, source, line, made_by = row
        known = {"op": op, "target": target, "value": value, "source": source, "code": line,
                 "made by": made_by[0] if made_by else ""}  # fmt: skip
        return Drawn(
            f"{graph}/{name}", tuple(graph.split(".")) if graph else (), self._label(graph, row), value,
            tuple(self._inputs(graph, row)), known["made by"], {key: text for key, text in known.items() if text},
            tuple(self._costs.get(graph, {}).get(name, ())), self._opens(graph, row) is not None,
        )  # fmt: skip

    def _opens(self, graph: str, row: Sequence[Any]) -> str | None:
        """Return the graph that stands behind a call of a module."""
        called = _called(graph, row)
        return called if called is not None and self._entered.get(called) == f"{graph}/{row[0]}" else None

    def _label(self, graph: str, row: Sequence[Any]) -> str:
        name, op, target = row[:3]
        if op == "call_module":
            kind = self._classes.get(_called(graph, row) or "", "")
            return f"{target}: {kind}" if kind else target
        if op in ("placeholder", "output"):
            return name
        return f".{target}()" if op == "call_method" else target

    def _inputs(self, graph: str, row: Sequence[Any]) -> Iterator[str]:
        """Yield what a node reads: of a module that is drawn its output, and for its inputs the call."""
        rows = self._graphs[graph]
        for place in row[3]:
            opened = self._opens(graph, rows[place])
            yield f"{graph}/{rows[place][0]}" if opened is None else f"{opened}/{self._graphs[opened][-1][0]}"
        if row[1] == "placeholder" and graph in self._entered:
            yield self._entered[graph]


def _module(graph: str) -> str:
    """Return the name of the module that a graph is of; further graphs of one module are numbered."""
    return _NUMBER.sub("", graph)


def _called(graph: str, row: Sequence[Any]) -> str | None:
    """Return the qualified name of the module that a node calls."""
    return qualified(_module(graph), str(row[2])) if row[1] == "call_module" else None

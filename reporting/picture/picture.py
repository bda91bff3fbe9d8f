"""The graphs of a model before, between and after its passes, with every decision in its place, as plain data."""

from __future__ import annotations

import inspect
import linecache
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import modules_by_name
from ...passes.sites import Goal
from ...runtime.graphs import graph_name
from ...runtime.record import Decision, GraphView, NodeView, Record, view_of
from ...runtime.values import user_class
from ...tracing.program import Program
from ...version import VERSION
from ..wording import headline, summary
from .costs import NodeCost, Profile, measured_machine

__all__ = ["NOW", "SCHEMA_VERSION", "picture_of", "picture_of_programs"]

SCHEMA_VERSION = 1
"""Of the data; it grows when a key changes its meaning or goes, not when one is added."""

NOW = -1
"""The step of graphs that are there now, in the place of the number of a pass."""

_KEY = re.compile(r"(?P<owner>[^:\[]*?)(?:#(?P<number>\d+))?(?::(?P<nodes>.*))?")
_SPAN = re.compile(r"(?P<first>[^.]+)(?:\.\.(?P<last>[^(]+)\(\d+\))?")
_FIGURES = (
    "speedup", "speedup_low", "speedup_high", "before_us", "after_us", "meaning_error", "precision_error", "checked",
    "lowerings",
)  # fmt: skip


def picture_of(
    record: Record, model: nn.Module, profiles: tuple[Profile, Profile] | None = None, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Return everything that a picture of an optimized model shows, as plain JSON values (docs/file-formats.md).

    Args:
        record: what was done to the model.
        model: the optimized model.
        profiles: what the nodes of the model cost before and after.
        notes: what its user should know, a line each.
    """
    graphs = _Graphs()
    for name, graph in Program(model).graphs.items():
        if name not in record.graph_versions:
            graphs.add(name, (NOW, view_of(graph)))
    for name, versions in record.graph_versions.items():
        now = record.graphs_after.get(name)
        graphs.add(name, *versions, *(() if now is None else ((NOW, now),)))
    return {
        **_shown(graphs, record.skeleton, model),
        "headline": headline(record),
        "summary": [[title, text] for title, text in summary(record).items()],
        "notes": list(notes),
        "versions": {"fxopt": record.plan.fxopt, "torch": record.plan.torch},
        "passes": _passes(record),
        "sites": [_site(each) for each in record.plan.decisions],
        "opaque": [list(each) for each in record.opaque],
        "costs": None if profiles is None else _costs(*profiles),
    }


def picture_of_programs(
    before: Program, after: Program | None = None, profile: Profile | None = None
) -> dict[str, Any]:
    """Return the same of a model that no pass has rewritten, or of two that are compared: as if a pass had made the
    second of the first. A profile says what the nodes of the one model cost.
    """
    graphs, second = _Graphs(), (after or before).graphs
    first = before.graphs
    for name in dict.fromkeys((*first, *second)):
        old, new = (view_of(each[name]) if name in each else None for each in (first, second))
        graphs.add(name, *(() if old == new else ((0, old),)), *(() if new is None else ((NOW, new),)))
    counts = {"applied": 0, "undone": 0, "refused": 0}
    difference = {"name": "difference", "text": "", **counts, "seconds": None, "saved_us": 0}
    return {
        **_shown(graphs, before.model, (after or before).model),
        "headline": str(before.coverage()).partition("\n")[0],
        "versions": {"fxopt": VERSION, "torch": str(torch.__version__)},
        "passes": [] if after is None else [difference],
        "opaque": [[each.name, each.location or "", each.reason] for each in before.opaque.values()],
        **({} if profile is None else {"costs": _costs(profile, profile)}),
    }


def _shown(graphs: _Graphs, before: nn.Module, after: nn.Module) -> dict[str, Any]:
    """Return graphs and modules as plain values; nothing else is known of two models."""
    return {
        "schema_version": SCHEMA_VERSION, "title": user_class(type(before)).__name__, "summary": [], "notes": [],
        "sites": [], "costs": None, "modules": _modules(before, after), "sources": _sources(graphs.distinct, before),
        "graphs": [_packed(each) for each in graphs.distinct], "history": graphs.history,
    }  # fmt: skip


class _Graphs:
    """Graphs of a model, equal ones once.

    `history`: name of a graph -> pairs of the number of a pass and the graph that was there until it, -1 if there was
    none; and last `NOW` and the graph that is there now, unless none is.
    """

    def __init__(self) -> None:
        self.distinct: list[GraphView] = []
        self.history: dict[str, list[tuple[int, int]]] = {}
        self._known: dict[GraphView, int] = {}

    def add(self, name: str, *versions: tuple[int, GraphView | None]) -> None:
        """Note what a graph was until passes of these numbers."""
        self.history[name] = [(step, -1 if graph is None else self._number(graph)) for step, graph in versions]

    def _number(self, graph: GraphView) -> int:
        number = self._known.setdefault(graph, len(self.distinct))
        if number == len(self.distinct):
            self.distinct.append(graph)
        return number


def _packed(graph: GraphView) -> list[list[Any]]:
    """Return a graph as lists: names are long, and most nodes read the few before them."""
    place = {node.name: number for number, node in enumerate(graph.nodes)}
    return [_packed_node(node, place) for node in graph.nodes]


def _packed_node(node: NodeView, place: Mapping[str, int]) -> list[Any]:
    inputs = [place[name] for name in node.inputs if name in place]
    return [node.name, node.op, node.target, inputs, node.value, node.source, node.line, list(node.made_by)]


def _passes(record: Record) -> list[dict[str, Any]]:
    """Return what each pass of the pipeline did, gained and took."""
    decisions = record.plan.decisions
    found: list[dict[str, Any]] = []
    seconds = [trace.seconds for trace in record.traces]
    for step, text in enumerate(record.plan.pipeline):
        own = [each for each in decisions if each.step == step]
        counts = {status: sum(each.status == status for each in own) for status in ("applied", "undone", "refused")}
        saved = [each.measured.saved_us for each in own if each.status == "applied" and each.goal == Goal.SPEED.value]
        found.append({
            "name": own[0].pass_name if own else text.partition("{")[0],
            "text": text,
            **counts,
            "seconds": seconds[step] if len(seconds) == len(record.plan.pipeline) else None,
            "saved_us": sum(each for each in saved if each is not None),
        })  # fmt: skip
    return found


def _modules(before: nn.Module, after: nn.Module) -> dict[str, list[Any]]:
    """Return class, parameters and their bytes of each module, before and after; None where there is no such module."""
    sides = [_described(before), _described(after)]
    return {name: [side.get(name) for side in sides] for name in dict.fromkeys((*sides[0], *sides[1]))}


def _described(model: nn.Module) -> dict[str, list[Any]]:
    return {
        name: [user_class(type(module)).__name__, *_sizes(module.parameters()), _sizes(module.buffers())[1]]
        for name, module in modules_by_name(model).items()
    }


def _sizes(tensors: Iterable[Tensor]) -> list[int]:
    given = list(tensors)
    return [sum(each.numel() for each in given), sum(each.numel() * each.element_size() for each in given)]


def _site(decision: Decision) -> dict[str, Any]:
    """Return a decision with its place: the graph, and the first and the last of its nodes."""
    owner, nodes = _place(decision.key)
    figures = {name: _finite(decision.figures[name]) for name in _FIGURES if name in decision.figures}
    return {
        "pass": decision.pass_name, "step": decision.step, "status": decision.status, "graph": owner, "nodes": nodes,
        "label": decision.label or decision.key, "detail": decision.detail, "lowering": decision.choice,
        "reason": decision.reason, "cause": decision.cause, "numerics": decision.numerics, **figures,
    }  # fmt: skip


def _place(key: str) -> tuple[str, list[str]]:
    """Return the graph that the key of a site names, and nodes in it."""
    found = _KEY.fullmatch(key)
    if found is None:
        return key.partition(":")[0].replace("(root)", ""), []
    owner, number = found["owner"].replace("(root)", ""), found["number"]
    span = _SPAN.fullmatch(found["nodes"] or "")
    nodes = [name for name in (span["first"], span["last"]) if name] if span else []
    return graph_name(owner, int(number or 0)), nodes


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sources(graphs: Iterable[GraphView], model: nn.Module) -> dict[str, str]:
    """Return the text of each line of the user's code that a node is from, where its file can be read."""
    files = dict(_files(model))
    found: dict[str, str] = {}
    for source in dict.fromkeys(node.source for graph in graphs for node in graph.nodes):
        file, _, line = source.rpartition(":")
        if file in files and line.isdigit():
            found[source] = linecache.getline(files[file], int(line)).strip()
    return found


def _files(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield name and path of the files that the classes of modules are written in."""
    for kind in {base for module in model.modules() for base in user_class(type(module)).__mro__}:
        try:
            path = inspect.getsourcefile(kind)
        except (TypeError, OSError):
            continue
        if path is not None:
            yield Path(path).name, path


def _costs(before: Profile, after: Profile) -> dict[str, Any]:
    """Return what nodes and modules cost as lists: microseconds, operations, bytes moved."""
    machine = measured_machine()
    sides = {
        side: {
            "nodes": {name: {node: _cost(c) for node, c in nodes.items()} for name, nodes in profile.nodes.items()},
            "modules": {name: _cost(cost) for name, cost in profile.modules.items()},
        }
        for side, profile in (("before", before), ("after", after))
    }
    return {**sides, "machine": {"flops": machine.flops, "bandwidth": machine.bandwidth}}


def _cost(cost: NodeCost) -> list[float]:
    return [round(cost.seconds * 1e6, 3), cost.flops, cost.moved]

"""Look into a model as far as it takes to cut it into even stages, on each way that calls take through it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ...errors import GuardError, MatchFailure
from ...passes.sites import Refusal
from ...runtime.graphs import fitting, required_capture
from ...tracing.examples import Inputs
from ...tracing.isolation import in_phase
from ...tracing.program import Program
from .costs import Cost, NodeFacts, ValueKind, observed
from .cuts import BALANCE, Line, Stages, line_of
from .opening import OpenedModel, depends_on_mode, opened_graph, why_closed

__all__ = ["CutRoute", "find_stages", "other_routes"]


@dataclass(frozen=True)
class Route:
    """One way through a model."""

    opened: OpenedModel
    seen: Mapping[fx.Node, NodeFacts]

    def divided(self, stage_of: Mapping[fx.Node, int], count: int) -> dict[str, Any]:
        """Return, as plain values, what every rank needs to build its part: see `Layout.of`."""
        return {
            "count": count,
            "opened": dict(self.opened.chosen),
            "unpacked": dict(self.opened.unpacked),
            "stages": {node.name: stage for node, stage in stage_of.items()},
            "repeated": [node.name for node, each in self.seen.items() if each.repeatable and node.op != "placeholder"],
            "late": [node.name for node, each in self.seen.items() if each.repeatable_with_plain],
            "plain": [node.name for node, each in self.seen.items() if each.kind is ValueKind.PLAIN],
        }


@dataclass(frozen=True)
class CutRoute(Route):
    """Where a model is to be cut."""

    line: Line  # the nodes in order
    stages: Stages

    @property
    def stage_of(self) -> dict[fx.Node, int]:
        starts = self.stages.starts
        return {node: sum(place >= start for start in starts) - 1 for node, place in self.line.place.items()}

    def data(self) -> dict[str, Any]:
        """Return the division as plain values."""
        return self.divided(self.stage_of, len(self.stages.starts))


def _observed(
    model: nn.Module, chosen: Mapping[str, int], unpacked: dict[str, int], call: Inputs, cost: Cost, *, training: bool
) -> tuple[Route, dict[str, list[int]]]:
    """Open a graph and run it, again where it gives tuples, noted in `unpacked`, whose items can cross one by one."""
    while True:
        opened = opened_graph(model, chosen, unpacked)
        seen, fits = observed(opened, model, call, cost, training=training)
        lengths = {node.name: each.tuple_length for node, each in seen.items() if node.name not in unpacked}
        if not any(lengths.values()):
            return Route(opened, seen), fits
        unpacked.update({name: length for name, length in lengths.items() if length})


def find_stages(program: Program, stages: int, cost: Cost) -> CutRoute:
    """Return where to cut a model into stages, looking into modules until `BALANCE` is reached or nothing is left."""
    chosen, unpacked, model = {"": 0}, dict[str, int](), program.model
    best: CutRoute | None = None
    while True:
        try:
            call = program.whole_calls[0]
            route, fits = _observed(model, chosen, unpacked, call, cost, training=program.training)
        except MatchFailure:
            if best is None:
                raise
            return best
        opened, line = route.opened, line_of(route.opened.graph, route.seen, model)
        division = line.cut(stages)
        if division is not None and (best is None or division.imbalance < best.stages.imbalance):
            best = CutRoute(opened, route.seen, line, division)
        inside = _to_open(opened, line, fits, stages, model)
        if (best is not None and best.stages.imbalance <= BALANCE) or not inside:
            break
        chosen = {**chosen, **inside}
    if best is None:
        raise MatchFailure(
            f"the model cannot be cut into {stages} stages: {len(line.items)} groups of operations can be separated; "
            "values that are no tensors, writes in place and modules that are called twice keep the others together"
        )
    return best


def _to_open(
    opened: OpenedModel, line: Line, fits: Mapping[str, list[int]], stages: int, model: nn.Module
) -> dict[str, int]:
    """Return the modules to look into next: those inside which an ideal division would cut; else the costliest."""
    calls = [(node, opened.paths[node.name]) for node in line.items if opened.paths.get(node.name) in fits]
    open_ = {node: path for node, path in calls if why_closed(model.get_submodule(str(node.target))) is None}
    ideal = [node for node in line.straddling(stages) if node in open_]
    if not ideal and line.cut(stages) is None:
        costs = dict(zip(line.items, line.costs, strict=True))
        ideal = sorted(open_, key=lambda node: -costs[node])[:1]
    # Where the modes differ, each needs a way of its own through the module: such a one is looked into last.
    even = [node for node in ideal if not depends_on_mode(model.get_submodule(str(node.target)))]
    return {open_[node]: fits[open_[node]][0] for node in even or ideal}


_TRIES = 16
"""So many combinations of graphs are tried for a call: where a check of data decides, guards do not tell which fits."""


def other_routes(program: Program, found: CutRoute) -> Iterator[dict[str, Any] | Refusal]:
    """Yield, as `Layout.of` takes it, each other way of an example call in either mode, or why it is refused."""
    names, homes, count = set(found.opened.names.values()), _homes(found), len(found.stages.starts)
    known = [dict(found.opened.chosen)]
    for number, call in enumerate(program.whole_calls):
        for training in _modes(program, names, is_first=number == 0):
            try:
                route = _route(program.model, call, names, training)
                if dict(route.opened.chosen) not in known:
                    known.append(dict(route.opened.chosen))
                    yield route.divided(_stages_on(route, homes, program.model), count)
            except (GuardError, MatchFailure) as error:
                mode = "training" if training else "evaluation"
                yield Refusal(f"example call {number} in {mode}: {error}", at="(root)")


def _modes(program: Program, names: Collection[str], *, is_first: bool) -> list[bool]:
    """Return the modes in which a call may take another way than the one that was found."""
    opened = [program.module(name) for name in names]
    if all(len(required_capture(module).specializations) == 1 for module in opened):
        return []
    own = [] if is_first else [program.training]
    return [*own, not program.training] if any(map(depends_on_mode, opened)) else own


def _route(model: nn.Module, call: Inputs, names: Collection[str], training: bool) -> Route:
    """Return the way of a call through the modules that are looked into, or raise GuardError."""
    with in_phase(model, training):
        fits = fitting(model, call.args, call.kwargs)
    capture = required_capture(model)
    pending = [({"": capture.specializations.index(each)}, dict[str, int]()) for each in reversed(fits)]
    failure = GuardError("no graph of the model fits this call")
    for _ in range(_TRIES):
        if not pending:
            break
        chosen, unpacked = pending.pop()
        try:
            route, inside = _observed(model, chosen, unpacked, call, "flops", training=training)
        except GuardError as error:
            failure = error
            continue
        nodes = [node for node in route.opened.graph.find_nodes(op="call_module") if str(node.target) in names]
        paths = [path for node in nodes if (path := route.opened.paths.get(node.name)) in inside]
        if not paths:
            return route
        every = list(itertools.product(*(inside[path] for path in paths)))
        pending += [({**chosen, **dict(zip(paths, each, strict=True))}, dict(unpacked)) for each in reversed(every)]
    raise failure


def _homes(found: CutRoute) -> dict[str, list[int]]:
    """Return, for each module that is called and each tensor that is read, by which stages, in order."""
    homes: dict[str, list[int]] = {}
    for node, stage in found.stage_of.items():
        reads = [used for used in node.all_input_nodes if used.op == "get_attr"]
        for each in (node, *reads):
            if each.op in ("call_module", "get_attr"):
                homes.setdefault(str(each.target), []).append(stage)
    return homes


def _stages_on(route: Route, homes: Mapping[str, Sequence[int]], model: nn.Module) -> dict[fx.Node, int]:
    """Return the stage of each node: its module's or its tensors' own, else that of what it is computed from."""
    place = line_of(route.opened.graph, route.seen, model).place
    stage_of: dict[fx.Node, int] = {}
    known_by: dict[fx.Node, int] = {}
    calls: Counter[str] = Counter()
    for node in route.opened.graph.nodes:
        stage = known_by[node] = max((known_by[used] for used in node.all_input_nodes), default=0)
        if node not in place:
            continue
        for each in (node, *node.all_input_nodes):
            if each.op in ("call_module", "get_attr") and (each is node or each.op == "get_attr"):
                known = homes.get(str(each.target), (stage,))
                home = known[min(calls[str(each.target)], len(known) - 1)]
                calls[str(each.target)] += 1
                if home < stage:
                    raise MatchFailure(f"'{each.target}' comes after modules of a later stage")
                stage = home
        stage_of[node] = known_by[node] = stage
    end = max(stage_of.values(), default=0)
    for node, stage in stage_of.items():
        seen = route.seen[node]
        last = max((stage_of.get(user, end if user.op == "output" else 0) for user in node.users), default=stage)
        is_written = seen.last_writer is not None and stage_of.get(seen.last_writer, stage) > stage
        if is_written or (seen.kind is ValueKind.OTHER and last > stage):
            raise MatchFailure(f"'{node.name}' would cross into another stage")
    return stage_of

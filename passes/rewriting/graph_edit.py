"""The part of an edit that is about graphs: copies of them are edited, and what was there comes back."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx, nn
from torch.fx.node import Argument

from ...compat import all_modules
from ...errors import CaptureError
from ...operators import derived
from ...runtime.graphs import (
    Capture,
    Specialization,
    capture_of,
    graph_name,
    install,
    own,
    recompile,
    required_capture,
    with_graph,
    with_specializations,
)
from ...runtime.guards import Guard, in_evaluation
from ...runtime.state import Holder, holder_of
from ...runtime.values import Meta, meta_of
from ...tracing.program import Program
from ..sites import Site
from .changes import Journal
from .effects import has_effects
from .order import check_order_of_writes, check_well_formed, has_write_between, is_same_graph
from .snapshot import Snapshot

__all__ = ["GraphEdit"]

_CALLS = ("call_function", "call_method", "call_module")


@dataclass
class _Graphs:
    """The graphs of one module that an edit has made its own."""

    module: nn.Module
    before: Capture  # what the module ran from
    # for each graph the number of the one that it was made from
    made_from: list[int] = field(default_factory=list[int])

    def sources(self) -> list[fx.Graph]:
        return [self.before.specializations[number].graph for number in self.made_from]


class GraphEdit:
    """Change the graphs of the modules around one site.

    Every change is journalled, so `undo` puts back what was there; graphs are edited as copies, the user's original
    nodes stay as they were. New nodes know the pass and the site that made them (`node.meta["provenance"]`).

    Attributes:
        program: the program being changed.
        site: the place being rewritten; of several, or of several parts, the one that is worked on.
        failed_at: which of several sites an error is about, where it is known.
        trainable: a rewrite for evaluation leaves the model as it is in training.
    """

    def __init__(self, program: Program, site: Site, pass_name: str, snapshot: Snapshot | None = None) -> None:
        self.program = program
        self.site: Site = site
        self.failed_at: Site | None = None
        self.pass_name = pass_name
        self.trainable = False
        self._whole = site
        self._journal = Journal(snapshot or Snapshot())
        self._owners: dict[str, nn.Module] = {}
        self._holders: dict[str, Holder] = {}
        self._graphs: dict[str, _Graphs] = {}

    @property
    def owner(self) -> nn.Module:
        """Return the module that the site is in."""
        name = self.site.owner
        if name not in self._owners:
            self._owners[name] = self.program.module(name)
        return self._owners[name]

    @property
    def holder(self) -> Holder:
        """Return the holder of the children that the site's graph calls: what a context is around has another one."""
        name = self.site.owner
        if name not in self._holders:
            self._holders[name] = holder_of(self.program.model, name)
        return self._holders[name]

    @property
    def changed_owners(self) -> list[str]:
        """Return the names of the modules whose graphs are changed."""
        return list(self._graphs)

    @property
    def touched(self) -> set[nn.Module]:
        """Return the modules of the site, and those that are changed around it, such as who held a replaced one."""
        return {*all_modules(self.owner), *self._journal.changed}

    # -- the graph -------------------------------------------------------------------------------------------------

    @property
    def graph(self) -> fx.Graph:
        """Return the site's graph, for reading and for editing: a copy of what was there before."""
        self._own_graph()
        return self.program.graph(self.site.owner, self.site.specialization)

    def own_graphs(self) -> None:
        """Make copies of the graphs of the site, and of all its parts, the ones to be edited."""
        for place in self._whole.places:
            if place.owner not in self._graphs and capture_of(self.program.module(place.owner)) is not None:
                with self.at(place):
                    self._own_graph()

    def _own_graph(self, instead: fx.Graph | None = None) -> None:
        """Give the owner graphs that nobody else has: copies, or for the site's own graph another one."""
        if self._takes_graphs() or instead is not None:
            with_graph(self.owner, self.site.specialization, instead)
            self.program.touch()

    def _takes_graphs(self) -> bool:
        """Say whether this is the first change of the owner's graphs; then note what they are."""
        owner, name = self.owner, self.site.owner
        if name in self._graphs:
            return False
        before = capture_of(owner)
        if before is None:
            raise CaptureError(f"module '{name}' has no graph to edit")
        self._journal.note(lambda: install(owner, before))
        self._graphs[name] = _Graphs(owner, before, list(range(len(before.specializations))))
        return True

    @contextmanager
    def in_specialization(self, specialization: int) -> Generator[None]:
        """Work on another of the owner's graphs for a while: a changed child must be called alike from all of them."""
        site = self.site
        self.site = dataclasses.replace(site, specialization=specialization)
        try:
            yield
        finally:
            self.site = site

    @contextmanager
    def at(self, site: Site) -> Generator[None]:
        """Work on one of several sites, or parts of a site; after an error, `failed_at` tells where it happened."""
        whole, self.site = self.site, site
        try:
            yield
        except BaseException:
            self.failed_at = self.failed_at or site
            raise
        finally:
            self.site = whole

    def graphs_before(self) -> dict[str, fx.Graph]:
        """Return the graphs that the changed ones were made from, by their names in `Program.graphs`."""
        return {
            graph_name(owner, number): graph
            for owner, graphs in self._graphs.items()
            for number, graph in enumerate(graphs.sources())
        }

    @property
    def leaves_fewer_operations(self) -> bool:
        """Say whether the changed graphs make fewer calls than before, without having moved any into new modules."""
        before, after = Counter[str](), Counter[str]()
        for graphs in self._graphs.values():
            now = capture_of(graphs.module)
            before.update(node.op for graph in graphs.sources() for node in graph.nodes)
            after.update(node.op for each in (now.specializations if now else ()) for node in each.graph.nodes)
        fewer = sum(before[kind] - after[kind] for kind in _CALLS)
        return fewer > 0 and after["call_module"] <= before["call_module"]

    def set_graph(self, graph: fx.Graph) -> None:
        """Put `graph` in the place of the site's graph."""
        self._sign_new(graph, self.site.graph)
        self._own_graph(instead=graph)

    def set_specializations(self, specializations: Sequence[Specialization], made_from: Sequence[int]) -> None:
        """Put other graphs in the places of all that the owner has.

        Args:
            specializations: the graphs, with what they hold under; nobody else may have them.
            made_from: for each the number of the graph that it was made from.
        """
        self._takes_graphs()
        graphs = self._graphs[self.site.owner]
        graphs.made_from = [graphs.made_from[number] for number in made_from]
        for new, old in zip(specializations, graphs.sources(), strict=True):
            self._sign_new(new.graph, old)
        with_specializations(self.owner, specializations)
        self.program.touch()

    def call(
        self, target: Callable[..., Any] | str, *args: Any, before: fx.Node | None = None, **kwargs: Any
    ) -> fx.Node:
        """Add a call of a function, of the child module named `target`, or (as ".name") of a method of `args[0]`.

        It goes before `before`, by default right behind the last of its operands.
        """
        known: list[fx.Node] = [] if before is None else [before]
        fx.map_arg((args, kwargs), known.append)
        graph = known[0].graph if known and self.site.parts else self.graph
        anchor = before or _behind_operands(graph, (args, kwargs))
        with graph.inserting_before(anchor):
            if callable(target):
                node = graph.call_function(target, args, kwargs)
            elif target.startswith("."):
                node = graph.call_method(target[1:], args, kwargs)
            else:
                node = graph.call_module(target, args, kwargs)
        self.sign(node)
        return node

    def derive(self, function: Callable[..., Any], tensors: Sequence[str]) -> list[fx.Node]:
        """Add tensors made of the model's own and kept until these change; see `Derived` and `hold_in_evaluation`.

        Args:
            function: of tensors, to a tuple of tensors; pure, picklable, and equal where it computes the same.
            tensors: names of parameters and buffers, qualified from the owner module.
        """
        originals = [operator.attrgetter(name)(self.owner) for name in tensors]
        target = derived(function, len(originals))
        made = target.made(originals)
        anchor = _behind_operands(self.graph, ())
        reads = [self.get_attr(name, before=anchor) for name in tensors]
        for node, original in zip(reads, originals, strict=True):
            node.meta["parameter" if isinstance(original, nn.Parameter) else "buffer"] = True
        whole = self.call(target, *reads, before=anchor)
        parts = [self.call(operator.getitem, whole, index, before=anchor) for index in range(len(made))]
        for node, value in zip((*reads, whole, *parts), (*originals, made, *made), strict=True):
            node.meta["val"] = meta_of(value)
        return parts

    def hold_in_evaluation(self, children: Sequence[str]) -> None:
        """Let the site's graph hold only while these children are in evaluation; else the original forward is right."""
        reason = f"{self.pass_name} rewrote it for evaluation"
        self.hold_where([in_evaluation(name, reason) for name in children])
        self.trainable = True

    def hold_where(self, guards: Sequence[Guard], instead_of: Collection[Guard] = ()) -> None:
        """Let the site's graph hold only where these guards do, too, or in the place of some."""
        self._own_graph()
        specializations, number = required_capture(self.owner).specializations, self.site.specialization
        kept = (guard for guard in specializations[number].guards if guard not in instead_of)
        every = tuple(dict.fromkeys((*kept, *guards)))
        specializations[number] = dataclasses.replace(specializations[number], guards=every)
        self.program.touch()

    def graph_node(self, label: str) -> fx.Node:
        """Return the site's node called `label` in the graph being edited."""
        with self.at(self.site.part(label)):
            self._own_graph()
            return self.site[label]

    def _place_of(self, node: fx.Node) -> Site:
        """Return the part of the site in whose graph a node is; the one that is worked on, where there are no parts."""
        places = self.site.parts
        return next((p for p in places if p.owner in self._graphs and p.graph is node.graph), self.site)

    def get_attr(self, name: str, *, before: fx.Node | None = None) -> fx.Node:
        """Add a read of attribute `name`, qualified from the owner module."""
        graph = self.graph
        with graph.inserting_before(before or _behind_operands(graph, ())):
            node = graph.get_attr(name)
        self.sign(node)
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let every user of `old` read `new`, and erase `old` with whatever only it needed.

        Later sites that name `old` are given `new`.
        """
        _follow(new, old, self.program, self._place_of(old).owner)
        new.meta.setdefault("val", old.meta.get("val"))
        if new.meta.get("provenance") == (self.pass_name, self.site.key):
            new.meta.setdefault("origin", old.meta.get("origin", old.name))
        new.meta["replaces"] = (*new.meta.get("replaces", ()), old.name, *old.meta.get("replaces", ()))
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        self.erase(old)

    def erase(self, node: fx.Node) -> None:
        """Erase an unused node, and then those of its operands that nothing reads any more and that do nothing else."""
        unused, owner = [node], self._place_of(node).owner
        while unused:
            last = unused.pop()
            operands = last.all_input_nodes
            last.graph.erase_node(last)
            unused += [o for o in operands if not o.users and not has_effects(o, self.program, owner)]

    def move_users_behind(self, nodes: Sequence[fx.Node]) -> None:
        """Restore execution order after `nodes` took the place of earlier ones: what reads them comes behind them."""
        if not nodes:
            return
        graph = self.graph
        place = {node: number for number, node in enumerate(graph.nodes)}
        last = max(nodes, key=place.__getitem__)
        early: dict[fx.Node, None] = {}
        for node in graph.nodes:
            if place[node] < place[last] and any(s in early or s in set(nodes) for s in node.all_input_nodes):
                early[node] = None
        for node in reversed([node for node in early if node not in set(nodes)]):
            last.append(node)

    def sign(self, node: fx.Node) -> None:
        """Note on a new node which pass and site made it, unless that is noted already."""
        node.meta.setdefault("provenance", (self.pass_name, self.site.key))

    def _sign_new(self, graph: fx.Graph, before: fx.Graph) -> None:
        known = {node.name for node in before.nodes}
        for node in graph.nodes:
            if node.name not in known:
                self.sign(node)

    # -- landing ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Check the new graphs and compile them; a graph that is what it was counts as not changed. CaptureError if one
        is not well formed, MatchFailure if a read was carried over a write in place.
        """
        for name, graphs in list(self._graphs.items()):
            owner = graphs.module
            specializations = required_capture(owner).specializations
            if _is_as_before(specializations, graphs.before.specializations):
                install(owner, graphs.before)
                del self._graphs[name]
                continue
            for specialization, before in zip(specializations, graphs.sources(), strict=True):
                check_well_formed(specialization.graph, before, owner)
                check_order_of_writes(specialization.graph, before, self.program, name)
            recompile(owner)
        self.program.touch()

    def _set_metas(self, module: nn.Module, metas: Mapping[fx.Node, Meta]) -> None:
        """Say of nodes of a module's graphs what they give now; modules that share its graphs keep what they have."""
        before = required_capture(module)
        self._journal.note(lambda: install(module, before))
        for old, new in zip(before.specializations, own(module).specializations, strict=True):
            for node, mine in zip(old.graph.nodes, new.graph.nodes, strict=True):
                if node in metas:
                    self._journal.note(partial(mine.meta.update, val=node.meta["val"]))
                    mine.meta["val"] = metas[node]
        self._journal.accept(module)

    def on_undo(self, undo: Callable[[], object], *changed: nn.Module) -> None:
        """Journal a change that was made to these modules through an interface of their own."""
        self._journal.note(undo)
        self._journal.accept(*changed)

    def settle(self) -> None:
        """Let go of what was there before, members' own parameters too: the rewrite stays."""
        self._journal.clear()

    def undo(self) -> None:
        """Put everything back, last change first."""
        self._journal.undo()
        self._graphs.clear()
        self._owners.clear()
        self.program.touch()


def _is_as_before(now: Sequence[Specialization], before: Sequence[Specialization]) -> bool:
    return len(now) == len(before) and all(
        new.guards == old.guards and is_same_graph(new.graph, old.graph) for new, old in zip(now, before, strict=True)
    )


def _behind_operands(graph: fx.Graph, arguments: Argument) -> fx.Node:
    """Return the node before which a call with these arguments can stand: behind its last operand."""
    operands = graph.find_nodes(op="placeholder", sort=False)
    fx.map_arg(arguments, operands.append)
    return max(operands).next if operands else next(iter(graph.nodes))


def _follow(new: fx.Node, old: fx.Node, program: Program, owner: str) -> None:
    """Put a new node in the place of an old one that reads the same, where a write in place is between them."""
    reads_alike = not set(new.all_input_nodes).isdisjoint(old.all_input_nodes)
    if not new.users and new < old and reads_alike and has_write_between(new, old, program, owner):
        old.prepend(new)

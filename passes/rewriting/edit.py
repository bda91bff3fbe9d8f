"""The only thing that changes a program: one site's rewrite, landed whole or undone."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import Argument

from ...errors import CaptureError, MatchFailure
from ...operators import derived
from ...tracing.graphs import (
    Region,
    Specialization,
    capture_of,
    install,
    recompile,
    required_capture,
    with_graph,
    with_specializations,
)
from ...tracing.guards import in_evaluation
from ...tracing.program import Program
from ...tracing.values import meta_of
from ..sites import Site
from ..state import StateMap, StateStep, holder_of
from .effects import has_effects
from .foreign import run_function
from .journal import Journal
from .well_formed import check_well_formed

__all__ = ["Edit"]


class Edit:
    """Change the module around one site: its graph, its children and the names of its tensors.

    Every change is journalled, so `undo` puts back what was there; the graph is edited as a copy, the user's original
    nodes stay as they were. New nodes know the pass and the site that made them (`node.meta["provenance"]`).

    Attributes:
        program: the program being changed.
        site: the place being rewritten; of several, the first.
        owner: the module that the site is in.
        failed_at: which of several sites an error is about, where it is known.
        holder: of the children that the site's graph calls; for what runs under a context the module around it.
        trainable: a rewrite for evaluation leaves the model as it is in training.
    """

    def __init__(self, program: Program, site: Site, pass_name: str) -> None:
        self.program = program
        self.site: Site = site
        self.failed_at: Site | None = None
        self.pass_name = pass_name
        self.owner = program.module(site.owner)
        self.holder = holder_of(program.model, site.owner)
        self._journal = Journal()
        self._steps: list[StateStep] = []
        self._before = capture_of(self.owner)
        self._owned = False
        self._made_from: list[int] | None = None
        self.trainable = False

    # -- the graph -------------------------------------------------------------------------------------------------

    @property
    def graph(self) -> fx.Graph:
        """Return the site's graph, for reading and for editing: a copy of what was there before."""
        self._own_graph()
        return self.program.graph(self.site.owner, self.site.specialization)

    def _own_graph(self, instead: fx.Graph | None = None) -> None:
        """Give the owner graphs that nobody else has: copies, or for the site's own graph another one."""
        if self._takes_graphs() or instead is not None:
            with_graph(self.owner, self.site.specialization, instead)
            self.program.touch()

    def _takes_graphs(self) -> bool:
        """Say whether this is the first change of the owner's graphs; then note what they are."""
        before = self._before
        if before is None:
            raise CaptureError(f"module '{self.site.owner}' has no graph to edit")
        if self._owned:
            return False
        self._journal.note(lambda: install(self.owner, before))
        self._owned = True
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
        """Work on one of several sites of the same graph; after an error, `failed_at` tells where it happened."""
        whole, self.site = self.site, site
        try:
            yield
        except BaseException:
            self.failed_at = self.failed_at or site
            raise
        finally:
            self.site = whole

    def graphs_before(self) -> dict[str, str]:
        """Return the text of the graphs that those of the owner were made from, by their names in `Program.graphs`."""
        if not self._owned:
            return {}
        return {
            f"{self.site.owner}#{number}" if number else self.site.owner: str(graph)
            for number, graph in enumerate(self._graphs_made_from())
        }

    def _graphs_made_from(self) -> list[fx.Graph]:
        """Return the graph that each of the owner's graphs was made from."""
        specializations = [] if self._before is None else self._before.specializations
        numbers = range(len(specializations)) if self._made_from is None else self._made_from
        return [specializations[number].graph for number in numbers]

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
        self._made_from = [number if self._made_from is None else self._made_from[number] for number in made_from]
        for new, old in zip(specializations, self._graphs_made_from(), strict=True):
            self._sign_new(new.graph, old)
        with_specializations(self.owner, specializations)
        self.program.touch()

    def call(
        self, target: Callable[..., Any] | str, *args: Any, before: fx.Node | None = None, **kwargs: Any
    ) -> fx.Node:
        """Add a call of a function, of the child module named `target`, or (as ".name") of a method of `args[0]`.

        It goes before `before`, by default right behind the last of its operands.
        """
        graph = self.graph
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
        made = torch.no_grad()(target)(*originals)
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
        self._own_graph()
        specializations, number = required_capture(self.owner).specializations, self.site.specialization
        reason = f"{self.pass_name} rewrote it for evaluation"
        asked = (in_evaluation(name, reason) for name in children)
        guards = tuple(dict.fromkeys((*specializations[number].guards, *asked)))
        specializations[number] = dataclasses.replace(specializations[number], guards=guards)
        self.trainable = True
        self.program.touch()

    def graph_node(self, label: str) -> fx.Node:
        """Return the site's node called `label` in the graph being edited."""
        self._own_graph()
        return self.site[label]

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
        new.meta.setdefault("val", old.meta.get("val"))
        new.meta["replaces"] = (*new.meta.get("replaces", ()), old.name, *old.meta.get("replaces", ()))
        if new.meta.get("provenance") == (self.pass_name, self.site.key):
            new.meta.setdefault("origin", old.meta.get("origin", old.name))
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        self.erase(old)

    def erase(self, node: fx.Node) -> None:
        """Erase an unused node, and then those of its operands that nothing reads any more and that do nothing else."""
        unused = [node]
        while unused:
            last = unused.pop()
            operands = last.all_input_nodes
            last.graph.erase_node(last)
            unused += [o for o in operands if not o.users and not has_effects(o, self.program, self.site.owner)]

    def move_users_behind(self, nodes: Sequence[fx.Node]) -> None:
        """Restore execution order after `nodes` took the place of earlier ones: what reads them comes behind them."""
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

    def run_function(self, function: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
        """Give the site's graph to a function as a `GraphModule` and take the graph it returns; see `run_function`."""
        self.set_graph(run_function(function, self.owner, self.graph, self._adopt))

    def _adopt(self, target: str, value: Any) -> None:
        """Take over a module or tensor that a function made; a tensor as a buffer that no state dict holds."""
        path, _, name = target.rpartition(".")
        holder = self.owner.get_submodule(path)
        self._journal.keep(holder)
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            holder.register_buffer(name, value, persistent=False)
        else:
            setattr(holder, name, value)
        self.program.touch()

    # -- the module tree -------------------------------------------------------------------------------------------

    def add_module(self, module: nn.Module, *, name: str) -> str:
        """Register `module` as a child of the owner as `name`, or `name_1`, ... if that is taken; return the name."""
        free = self._free_name(name)
        module.train(self.owner.training)
        self._set_child(free, module)
        return free

    def add_owned(self, module: nn.Module, *, name: str) -> str:
        """Register `module`, which holds tensors, as a child of the site's holder; return its name.

        What runs under a context borrows it under the same name; elsewhere the owner itself is the holder.
        """
        holders = self.holder.borrowers_and_holder
        free = self._free_name(name, *holders)
        module.train(self.holder.module.training)
        for holder in holders:
            self._journal.keep(holder)
        self.holder.share(free, module)
        self.program.touch()
        return free

    def remove_module(self, name: str) -> None:
        """Take the child `name` out of the owner; nothing may call it any more."""
        self._journal.keep(self.owner)
        delattr(self.owner, name)
        self.program.touch()

    def add_constant(self, value: torch.Tensor, *, name: str) -> str:
        """Keep a constant tensor on the owner; return its name.

        It is a plain attribute, not a buffer: like the literal it replaces, it follows neither `.to()` nor `.half()`,
        and is not part of the state dict.
        """
        free = self._free_name(name)
        self._set_child(free, value)
        return free

    def _free_name(self, name: str, *holders: nn.Module) -> str:
        free, number = name, 0
        while any(hasattr(holder, free) for holder in holders or (self.owner,)):
            number += 1
            free = f"{name}_{number}"
        return free

    def _set_child(self, name: str, value: Any) -> None:
        self._journal.keep(self.owner)
        setattr(self.owner, name, value)
        self.program.touch()

    def on_undo(self, undo: Callable[[], object]) -> None:
        """Journal a change that was made through another module's own interface."""
        self._journal.note(undo)
        self.program.touch()

    # -- state -----------------------------------------------------------------------------------------------------

    def record_state(self, step: StateStep) -> None:
        """Say what the rewrite does to tensors; names are qualified from the owner module.

        Raises:
            MatchFailure: in a region that a pass made, which owns none.
        """
        if isinstance(self.holder.module, Region):
            raise MatchFailure(f"'{self.site.owner}' is a region, whose tensors belong to the module around it")
        self._steps.append(step)

    def state_map(self) -> StateMap:
        """Return the rewrite's effect on names and tensors, from the owner module's point of view."""
        return StateMap(tuple(self._steps))

    def state_map_of_model(self) -> StateMap:
        """Return the rewrite's effect by the names that the model's state dict has, where no region is named."""
        return StateMap(tuple(step.renamed(self.holder.qualified) for step in self._steps))

    # -- landing ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Check the new graph and compile it.

        Raises:
            CaptureError: if the graph is not well formed.
        """
        if not self._owned:
            return
        for specialization, before in zip(
            required_capture(self.owner).specializations, self._graphs_made_from(), strict=True
        ):
            check_well_formed(specialization.graph, before, self.owner)
        recompile(self.owner)
        self.program.touch()

    def settle(self) -> None:
        """Let go of what was there before, members' own parameters too: the rewrite stays."""
        self._journal.clear()

    def undo(self) -> None:
        """Put everything back, last change first."""
        self._journal.undo()
        self._steps.clear()
        self._owned, self._made_from = False, None
        self.program.touch()


def _behind_operands(graph: fx.Graph, arguments: Argument) -> fx.Node:
    """Return the node before which a call with these arguments can stand: behind its last operand."""
    operands = graph.find_nodes(op="placeholder", sort=False)
    fx.map_arg(arguments, operands.append)
    return max(operands).next if operands else next(iter(graph.nodes))

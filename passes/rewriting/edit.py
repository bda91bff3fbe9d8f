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
    Variant,
    capture_of,
    install,
    recompile,
    required_capture,
    with_graph,
    with_variants,
)
from ...tracing.guards import in_evaluation
from ...tracing.program import Program
from ...tracing.recording import AttributeState
from ...tracing.values import meta_of
from ..sites import Site
from ..state import StateMap, StateStep, owner_of
from .effects import has_effects
from .foreign import run_function
from .well_formed import check_well_formed

__all__ = ["Edit"]


class Edit:
    """Change the module around one site: its graph, its children and the names of its tensors.

    Every change is journalled, so `undo` puts back what was there; the graph is edited as a copy, the user's original
    nodes stay as they were. New nodes know the pass and the site that made them (`node.meta["provenance"]`).

    Attributes:
        program: the program being changed.
        site: the place being rewritten; of several, the first.
        failed_at: which of several sites an error is about, where it is known.
        owner: of the children that the site's graph calls; for what runs under a context the module around it.
        trainable: a rewrite for evaluation leaves the model as it is in training.
    """

    def __init__(self, program: Program, site: Site, pass_name: str) -> None:
        self.program = program
        self.site: Site = site
        self.failed_at: Site | None = None
        self.pass_name = pass_name
        self.home = program.module(site.home)
        self.owner = owner_of(program.model, site.home)
        self._undo: list[Callable[[], object]] = []
        self._steps: list[StateStep] = []
        self._journalled: set[nn.Module] = set()
        self._before = capture_of(self.home)
        self._owned = False
        self._made_from: list[int] | None = None
        self.trainable = False

    # -- the graph -------------------------------------------------------------------------------------------------

    @property
    def graph(self) -> fx.Graph:
        """Return the site's graph, for reading and for editing: a copy of what was there before."""
        self._own_graph()
        return self.program.graph(self.site.home, self.site.variant)

    def _own_graph(self, instead: fx.Graph | None = None) -> None:
        """Give the home graphs that nobody else has: copies, or for the site's own graph another one."""
        before = self._before
        if before is None:
            raise CaptureError(f"module '{self.site.home}' has no graph to edit")
        if not self._owned:
            self._undo.append(lambda: install(self.home, before))
            self._owned = True
            with_graph(self.home, self.site.variant, instead)
            self.program.touch()
        elif instead is not None:
            with_graph(self.home, self.site.variant, instead)
            self.program.touch()

    @contextmanager
    def in_variant(self, variant: int) -> Generator[None]:
        """Work on another of the home's graphs for a while: a changed child must be called alike from all of them."""
        site = self.site
        self.site = dataclasses.replace(site, variant=variant)
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
        """Return the text of the graphs that those of the home were made from, by their names in `Program.graphs`."""
        if not self._owned:
            return {}
        return {
            f"{self.site.home}#{number}" if number else self.site.home: str(graph)
            for number, graph in enumerate(self._graphs_made_from())
        }

    def _graphs_made_from(self) -> list[fx.Graph]:
        """Return the graph that each of the home's graphs was made from."""
        variants = [] if self._before is None else self._before.variants
        numbers = range(len(variants)) if self._made_from is None else self._made_from
        return [variants[number].graph for number in numbers]

    def set_graph(self, graph: fx.Graph) -> None:
        """Put `graph` in the place of the site's graph."""
        known = {node.name for node in self.site.graph.nodes}
        for node in graph.nodes:
            if node.name not in known:
                self.sign(node)
        self._own_graph(instead=graph)

    def set_variants(self, variants: Sequence[Variant], made_from: Sequence[int]) -> None:
        """Put other graphs in the places of all that the home has.

        Args:
            variants: the graphs, with what they hold under; nobody else may have them.
            made_from: for each the number of the graph that it was made from.
        """
        before = self._before
        if before is None:
            raise CaptureError(f"module '{self.site.home}' has no graph to edit")
        if not self._owned:
            self._undo.append(lambda: install(self.home, before))
        earlier = range(len(before.variants)) if self._made_from is None else self._made_from
        self._owned, self._made_from = True, [earlier[number] for number in made_from]
        for new, old in zip(variants, self._graphs_made_from(), strict=True):
            known = {node.name for node in old.nodes}
            for node in new.graph.nodes:
                if node.name not in known:
                    self.sign(node)
        with_variants(self.home, variants)
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
            tensors: names of parameters and buffers, qualified from the home module.
        """
        originals = [operator.attrgetter(name)(self.home) for name in tensors]
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
        """Let the site's graph hold only while these children are in evaluation; elsewhere its own forward is right."""
        self._own_graph()
        variants, number = required_capture(self.home).variants, self.site.variant
        reason = f"{self.pass_name} rewrote it for evaluation"
        asked = (in_evaluation(name, reason) for name in children)
        guards = tuple(dict.fromkeys((*variants[number].guards, *asked)))
        variants[number] = dataclasses.replace(variants[number], guards=guards)
        self.trainable = True
        self.program.touch()

    def graph_node(self, label: str) -> fx.Node:
        """Return the site's node called `label` in the graph being edited."""
        self._own_graph()
        return self.site[label]

    def get_attr(self, name: str, *, before: fx.Node | None = None) -> fx.Node:
        """Add a read of attribute `name`, qualified from the home module."""
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
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        self.erase(old)

    def erase(self, node: fx.Node) -> None:
        """Erase an unused node, and then those of its operands that nothing reads any more and that do nothing else."""
        unused = [node]
        while unused:
            last = unused.pop()
            operands = last.all_input_nodes
            last.graph.erase_node(last)
            unused += [o for o in operands if not o.users and not has_effects(o, self.program, self.site.home)]

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

    def run_function(self, function: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
        """Give the site's graph to a function as a `GraphModule` and take the graph it returns; see `run_function`."""
        self.set_graph(run_function(function, self.home, self.graph, self._adopt))

    def _adopt(self, target: str, value: Any) -> None:
        """Take over a module or tensor that a function made; a tensor as a buffer that no state dict holds."""
        path, _, name = target.rpartition(".")
        owner = self.home.get_submodule(path)
        self._journal(owner)
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            owner.register_buffer(name, value, persistent=False)
        else:
            setattr(owner, name, value)
        self.program.touch()

    # -- the module tree -------------------------------------------------------------------------------------------

    def add_module(self, module: nn.Module, *, name: str) -> str:
        """Register `module` as a child of the home under `name`, or `name_1`, ... if that is taken; return the name."""
        free = self._free_name(name)
        module.train(self.home.training)
        self._set_child(free, module)
        return free

    def add_owned(self, module: nn.Module, *, name: str) -> str:
        """Register `module`, which holds tensors, as a child of the site's owner; return its name.

        What runs under a context borrows it under the same name; elsewhere the home itself is the owner.
        """
        holders = self.owner.borrowers_and_owner
        free = self._free_name(name, *holders)
        module.train(self.owner.module.training)
        for holder in holders:
            self._journal(holder)
        self.owner.lend(free, module)
        self.program.touch()
        return free

    def remove_module(self, name: str) -> None:
        """Take the child `name` out of the home; nothing may call it any more."""
        self._journal(self.home)
        delattr(self.home, name)
        self.program.touch()

    def add_constant(self, value: torch.Tensor, *, name: str) -> str:
        """Keep a constant tensor on the home; return its name.

        It is a plain attribute, not a buffer: like the literal it replaces, it follows neither `.to()` nor `.half()`,
        and is not part of the state dict.
        """
        free = self._free_name(name)
        self._set_child(free, value)
        return free

    def _free_name(self, name: str, *holders: nn.Module) -> str:
        free, number = name, 0
        while any(hasattr(holder, free) for holder in holders or (self.home,)):
            number += 1
            free = f"{name}_{number}"
        return free

    def _set_child(self, name: str, value: Any) -> None:
        self._journal(self.home)
        setattr(self.home, name, value)
        self.program.touch()

    def _journal(self, module: nn.Module) -> None:
        """Note what a module holds, in its order, to put it back on undoing."""
        if module not in self._journalled:
            self._journalled.add(module)
            self._undo.append(AttributeState(module).restore)

    def on_undo(self, undo: Callable[[], object]) -> None:
        """Journal a change that was made through another module's own interface."""
        self._undo.append(undo)
        self.program.touch()

    # -- state -----------------------------------------------------------------------------------------------------

    def record_state(self, step: StateStep) -> None:
        """Say what the rewrite does to tensors; names are qualified from the home module.

        Raises:
            MatchFailure: in a region that a pass made, which owns none.
        """
        if isinstance(self.owner.module, Region):
            raise MatchFailure(f"'{self.site.home}' is a region, whose tensors belong to the module around it")
        self._steps.append(step)

    def state_map(self) -> StateMap:
        """Return the rewrite's effect on names and tensors, from the home module's point of view."""
        return StateMap(tuple(self._steps))

    def state_map_of_model(self) -> StateMap:
        """Return the rewrite's effect by the names that the model's state dict has, where no region is named."""
        return StateMap(tuple(step.renamed(self.owner.qualified) for step in self._steps))

    # -- landing ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Check the new graph and compile it.

        Raises:
            CaptureError: if the graph is not well formed.
        """
        if not self._owned:
            return
        for variant, before in zip(required_capture(self.home).variants, self._graphs_made_from(), strict=True):
            check_well_formed(variant.graph, before, self.home)
        recompile(self.home)
        self.program.touch()

    def settle(self) -> None:
        """Let go of what was there before, members' own parameters too: the rewrite stays."""
        self._undo.clear()

    def undo(self) -> None:
        """Put everything back, last change first."""
        while self._undo:
            self._undo.pop()()
        self._steps.clear()
        self._owned, self._made_from = False, None
        self.program.touch()


def _behind_operands(graph: fx.Graph, arguments: Argument) -> fx.Node:
    """Return the node before which a call with these arguments can stand: behind its last operand."""
    operands = graph.find_nodes(op="placeholder", sort=False)
    fx.map_arg(arguments, operands.append)
    return max(operands).next if operands else next(iter(graph.nodes))

"""Write a mixture of experts into the graph of its module."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from ...compat import modules_by_name
from ...layers.ensemble import split_vectors
from ...layers.members import settings_of, vector_size, ways_to
from ...layers.moe import FusedExperts, Lowering, added_to
from ...operators import canonical_name, mutates, reached, upwards
from ...passes.rewriting import Edit, hold_written_out, leave_views, stack_members
from ...runtime.graphs import copy_graph
from ...runtime.guards import require
from .members import Items, Source, operands
from .mixtures import Mixture, assigned
from .rounds import dropping_module

__all__ = ["sweep", "write"]


def write(mixture: Mixture, lowering: Lowering, edit: Edit, *, always: bool) -> None:
    """Let the module compute its experts together, for any number of tokens or for about as many as the call had."""
    graph = copy_graph(mixture.unrolled.graph)
    new = dict(zip(mixture.unrolled.graph.nodes, graph.nodes, strict=True))
    edit.give_graph(mixture.unrolled.specialization)
    layers = mixture.template.layers
    child = edit.add_module(
        FusedExperts(
            mixture.template.compute, [(layer.transposed, layer.bias is not None) for layer in layers],
            routing=mixture.routed.kind, scale=mixture.loop.rounds[0].scale, lowering=lowering,
            spare=mixture.routed.spare, adds_to_inputs=_adds_to_inputs(mixture),
            tokens=None if always else mixture.loop.tokens, slots_first="tokens" not in mixture.routed.orders,
        ),
        name="mixture",
    )  # fmt: skip
    _Rewrite(mixture, graph, new, edit.owner).run(child, _stacked(mixture, edit))
    edit.set_specializations([dataclasses.replace(mixture.unrolled.specialization, graph=graph)], [0])
    if not mixture.separate:  # all are stacked already
        before, after = (
            {str(n.target) for n in g.find_nodes(op="call_module")} for g in (mixture.unrolled.graph, graph)
        )
        hold_written_out(edit, sorted(before - after))
    if mixture.template.idle:
        edit.hold_in_evaluation(sorted({dropping_module(node) or "" for node in mixture.template.idle}))


def _adds_to_inputs(mixture: Mixture) -> bool:
    """Say whether the loop adds to zeros like its inputs."""
    target = mixture.loop.target
    if canonical_name(target) != "zeros_like" or len(operands(target)) != 1 or target.kwargs.get("dtype") is not None:
        return False
    return operands(target)[0] is mixture.routed.hidden


class _Rewrite:
    def __init__(self, mixture: Mixture, graph: fx.Graph, new: dict[fx.Node, fx.Node], owner: nn.Module) -> None:
        self.mixture, self.graph, self.new, self.owner = mixture, graph, new, owner
        self.target, self.result = new[mixture.loop.target], new[mixture.loop.result]
        self.last = new[mixture.loop.writes[-1]]

    def run(self, child: str, stacks: dict[Source, str | fx.Node]) -> None:
        routed = self.mixture.routed
        before = set[fx.Node]()
        for node in self.graph.nodes:
            before.add(node)
            if node is self.last:
                break
        with self.graph.inserting_after(self.last):
            tensors = [self._tensor(stacks, source) for source in self.mixture.sources]
        anchor = max([self.last, *tensors])
        weights = None if routed.weights is None else self.new[routed.weights]
        chosen, limit = self.new[routed.chosen], routed.capacity
        with self.graph.inserting_after(anchor):
            given = (self.new[routed.hidden], chosen, weights, *tensors)
            named: dict[str, Any] = {}
            if limit is not None:
                named["capacity"] = self.new[limit] if isinstance(limit, fx.Node) else limit
            call = self.graph.call_module(child, given, named)
        if routed.is_turned:
            self._turn(call)
        found = call
        if not self._is_alike():
            target = self.target
            if self.mixture.loop.replaces:  # all of it
                with self.graph.inserting_before(call):
                    target = self.graph.call_function(torch.zeros_like, (target,))
                before.add(target)
            with self.graph.inserting_after(call):
                found = self.graph.call_function(added_to, (target, call))
        found.meta["val"] = self.target.meta.get("val")
        for user in list(self.result.users):
            if user not in before and user is not found:
                user.replace_input_with(self.result, found)
        self._sweep()

    def _turn(self, call: fx.Node) -> None:
        """Hand over choices and weights [n, experts] as [experts, n]."""
        for place in (1, 2):
            if isinstance(given := operands(call)[place], fx.Node):
                with self.graph.inserting_before(call):
                    call.update_arg(place, self.graph.call_method("t", (given,)))

    def _tensor(self, stacks: dict[Source, str | fx.Node], source: Source) -> fx.Node:
        known = stacks[source]
        if isinstance(known, fx.Node):
            return self.new[known]
        stack, size = self.graph.get_attr(known), vector_size(self.owner, known)
        if size is None or not isinstance(source, Items):
            return stack
        with self.graph.inserting_after(stack):
            return self.graph.call_function(split_vectors, (stack, source.count, size))

    def _is_alike(self) -> bool:
        """Say whether the tensor that the loop added to is zeros like the inputs, so that the results are all."""
        target, values = self.mixture.loop.target, self.mixture.unrolled.values
        hidden, output = self.mixture.routed.hidden, self.mixture.loop.rounds[0].output
        if values[target].shape != (*values[hidden].shape[:-1], values[output].shape[-1]) or values[target].any():
            return False
        if _adds_to_inputs(self.mixture):
            return True
        # Or it has its type from the loop itself.
        return not self.mixture.loop.tainted.isdisjoint(upwards(target))

    def _sweep(self) -> None:
        """Take away what only the loop needed."""
        values = self.mixture.unrolled.values
        plain = {self.new[node] for node in self.new if isinstance(values.get(node), (int, float))}
        sweep(self.graph, {self.new[w] for w in self.mixture.loop.writes}, plain)


def sweep(graph: fx.Graph, writes: Collection[fx.Node] = (), plain: Collection[fx.Node] = ()) -> None:
    """Take away what nothing needs, checks of it, and `writes` where nothing reads them; `plain`: nodes of numbers."""
    live = _live(graph, writes)
    for node in reversed(graph.nodes):
        if node in live or node.op in ("placeholder", "output"):
            continue
        if node.op == "call_function" and node.target is require and _needs(node, plain) <= live:
            live.update(upwards(node))
            continue
        graph.erase_node(node)


def _live(graph: fx.Graph, writes: Collection[fx.Node]) -> set[fx.Node]:
    def kept_with(node: fx.Node) -> list[fx.Node]:
        # What is written in place into something that is still read stays, too.
        writing = [user for user in node.users if operands(user)[:1] == (node,) and mutates(user)]
        return [*node.all_input_nodes, *(user for user in writing if user not in writes)]

    return set(reached([graph.output_node(), *assigned(graph)], kept_with))


def _needs(check: fx.Node, plain: Collection[fx.Node]) -> set[fx.Node]:
    """Return what a check reads that is more than a look at it, or arithmetic with `plain` numbers."""

    def only_looks(node: fx.Node) -> bool:
        return node in plain or canonical_name(node) in ("len", "shape", "eq", "getitem") or node.target is getattr

    found = reached(check.all_input_nodes, lambda node: node.all_input_nodes if only_looks(node) else ())
    return {node for node in found if not only_looks(node)}


# -- stacking --------------------------------------------------------------------------------------------------------


def _stacked(mixture: Mixture, edit: Edit) -> dict[Source, str | fx.Node]:
    """Stack the parameters that are not yet; return the name or node of each family's stack."""
    families = list(dict.fromkeys(mixture.separate))
    found: dict[Source, str | fx.Node] = {s: s.stack for s in mixture.sources if not isinstance(s, Items)}
    if not families:
        return found
    named: dict[str, Items] = {}
    for source in families:
        name = source.inside or "weight"
        named[name if name not in named else f"{source.container.replace('.', '_')}.{name}"] = source
    places = {name: source.paths for name, source in named.items()}
    store, child = stack_members(places, edit, "stacked_experts", some=True)
    leave_views(places, store, edit, partial(_seals, families, edit.owner))
    return found | {source: f"{child}.{name}" for name, source in named.items()}


def _seals(families: Sequence[Items], owner: nn.Module, views: Iterable[str]) -> dict[str, set[str]]:
    """Return what must stay: the ways to experts, and what would have no effect on them."""
    roots = {path for each in families for path in Items(each.container, each.names).paths}
    inside = {f"{root}.{path}".rstrip(".") for root in roots for path in modules_by_name(owner.get_submodule(root))}
    members = dict.fromkeys((*views, *inside))
    sealed = ways_to(members)
    for path in members:
        sealed.setdefault(path, set()).update(settings_of(owner.get_submodule(path)), ("forward", "__class__"))
    for container in {each.container for each in families} - {""}:
        sealed.setdefault(container, set()).add("forward")
    return sealed

"""A mixture of experts as it was read off a call, what it decides by data, and routings to read it with others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...errors import MatchFailure
from ...operators import canonical_name, upwards
from ...passes.sites import VOLATILE
from ...runtime.guards import Attribute, Dictionary, module_at, require
from ...runtime.values import qualified
from ...tracing.trace import assign
from .members import Items, Source, operands
from .rounds import Loop
from .routing import RoutedBy
from .template import ExpertTemplate
from .unrolling import Unrolled

__all__ = ["Mixture", "assigned", "check_decisions", "check_loop", "routing_over", "routings_to"]


_MOST_ROUTINGS = 8
"""So many calls are read to reach experts without tokens."""


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts."""

    owner: str  # name of the module that computes it
    unrolled: Unrolled  # a call of that module
    loop: Loop  # what it does
    template: ExpertTemplate  # what each expert computes
    routed: RoutedBy  # where the routing comes from
    count: int

    @property
    def sources(self) -> list[Source]:
        """Return the families of tensors that the experts have, weight and bias of each linear layer in turn."""
        return [s for layer in self.template.layers for s in (layer.weight, layer.bias) if s is not None]

    @property
    def reached(self) -> set[int]:
        """Return the numbers of the experts that are called."""
        rounds = zip(self.loop.rounds, self.loop.called, strict=True)
        numbers = [each.experts if called < 0 else torch.tensor([called]) for each, called in rounds]
        return {int(number) for number in torch.cat(numbers)}

    def is_like(self, other: Mixture) -> bool:
        """Say whether two calls of one module compute the same with other tokens."""
        mine, theirs = self.routed, other.routed
        if self.loop.rounds[0].scale != other.loop.rounds[0].scale or self.layers != other.layers:
            return False
        names = [(each.chosen.name, each.weights and each.weights.name) for each in (mine, theirs)]
        return mine.kind == theirs.kind and names[0] == names[1]

    def reading(self, name: str) -> Mixture:
        """Return it with an earlier node as that of all tokens: where all go to one expert, its rows look so, too."""
        hidden = next(node for node in self.unrolled.graph.nodes if node.name == name or node is self.routed.hidden)
        return dataclasses.replace(self, routed=dataclasses.replace(self.routed, hidden=hidden))

    @property
    def layers(self) -> list[str]:
        """Return what tells one expert's computation from another's."""
        return [
            *(f"{node.op} {node.target} {node.args} {node.kwargs}" for node in self.template.compute.graph.nodes),
            *(
                f"{layer.weight.kind} {layer.bias and layer.bias.kind} {layer.transposed}"
                for layer in self.template.layers
            ),
        ]

    @property
    def rest(self) -> list[str]:
        """Return what is computed of the results."""
        made, places, steps = {self.loop.result}, dict[fx.Node, str](), list[str]()
        is_behind = False
        for node in self.unrolled.graph.nodes:
            if is_behind and not made.isdisjoint(node.all_input_nodes):
                made.add(node)
                given = fx.map_arg((operands(node), dict(node.kwargs)), lambda used: places.get(used, used.op))
                steps.append(f"{node.op} {node.target} {given}")
                places[node] = f"%{len(places)}"
            is_behind = is_behind or node is self.loop.writes[-1]
        return steps

    @property
    def separate(self) -> list[Items]:
        """Return the families of tensors that are not stacked yet."""
        return [source for source in self.sources if isinstance(source, Items)]


def routings_to(mixture: Mixture, unread: set[int]) -> Iterator[dict[str, Tensor]]:
    """Yield routings to experts without tokens, noted in `unread`; whoever runs one takes away what it reached."""
    unread |= set(range(mixture.count)) - mixture.reached
    for _ in range(_MOST_ROUTINGS):
        if not unread:
            return
        order = [*sorted(unread), *(number for number in range(mixture.count) if number not in unread)]
        yield routing_over(mixture, order)


def routing_over(mixture: Mixture, order: Sequence[int]) -> dict[str, Tensor]:
    """Return a routing that sends the tokens to these experts in turn: the value of the node that says it."""
    chosen = mixture.routed.chosen
    value = mixture.unrolled.values[chosen]
    if mixture.routed.kind in ("chosen", "scores"):
        return {chosen.name: torch.tensor(order)[torch.arange(value.numel()) % len(order)].view(value.shape).to(value)}
    mask = torch.zeros_like(value).view(-1, mixture.count)
    rows = torch.arange(len(mask))
    mask[rows, torch.tensor(order)[rows % len(order)]] = 1
    return {chosen.name: mask.view(value.shape)}


def check_decisions(unrolled: Unrolled) -> None:
    """Raise MatchFailure where calls go by what others left on modules, or decide by what another may not have."""
    if unrolled.specialization.volatile and not all(_only_leaves(node, unrolled) for node in assigned(unrolled.graph)):
        raise MatchFailure(VOLATILE)
    for decided in unrolled.decided:
        if decided.kind == "value":
            raise MatchFailure(f"its forward decides by the data in a tensor, at {decided.place}")


def assigned(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that set attributes of modules."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target is assign]


def _only_leaves(node: fx.Node, unrolled: Unrolled) -> bool:
    """Say whether a node leaves a tensor of this call on the module, which no call reads: a loss, above all."""
    setter, name, value = operands(node)
    if not isinstance(value, fx.Node) or not isinstance(unrolled.values.get(value), Tensor):
        return False
    path = str(setter.target).rpartition(".")[0]
    if any(used.op == "get_attr" and used.target == qualified(path, name) for used in upwards(value)):
        return False
    owner = module_at(filter(None, path.split(".")))
    asked = (Attribute(owner, name), Dictionary(owner))
    return all(guard.source not in asked for guard in unrolled.specialization.guards)


def check_loop(unrolled: Unrolled, loop: Loop) -> None:
    """Raise MatchFailure where the loop would do something else with other numbers."""
    nodes = set(unrolled.graph.nodes)
    for decided in unrolled.decided:
        if not decided.uses.isdisjoint(loop.tainted):
            raise MatchFailure(f"its forward decides by what an expert gives, at {decided.place}")
        if decided.compared is not None and decided.compared not in nodes:
            raise MatchFailure(f"its forward decides by the data in a tensor, at {decided.place}")
    for node in nodes:
        if (
            node.op == "call_function"
            and node.target is require
            and canonical_name(asked := operands(node)[0]) != "len"
        ):
            known = _described(asked, unrolled.values)
            if not _is_of_types(asked) and (known in loop.tainted or known in unrolled.shaped):
                place = node.meta.get("source")
                raise MatchFailure(
                    f"its forward decides by the type or shape of what an expert gets or gives, at {place}"
                )


def _is_of_types(node: fx.Node) -> bool:
    """Say whether a decision compares the types of two tensors, or asks for one of no floats: a cast hangs on that."""
    if canonical_name(node) not in ("eq", "ne") or len(operands(node)) != 2:
        return False
    left, right = operands(node)
    if not (isinstance(left, fx.Node) and left.target is getattr and operands(left)[1] == "dtype"):
        return False
    return isinstance(right, fx.Node) or (isinstance(right, torch.dtype) and not right.is_floating_point)


def _described(node: fx.Node, values: Mapping[fx.Node, Any]) -> fx.Node:
    """Return the tensor whose type or shape a value comes from."""
    while node.all_input_nodes and (node.target is getattr or not isinstance(values.get(node), Tensor)):
        node = node.all_input_nodes[0]
    return node

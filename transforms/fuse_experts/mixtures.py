"""A mixture of experts as it was read off a call, and routings that are made to read it with others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from .members import Items, Slices, Source, operands
from .rounds import Loop
from .routing import RoutedBy
from .template import Template
from .unrolling import Unrolled

__all__ = ["Mixture", "members_of", "routing_over", "routings_to"]

_MOST_ROUTINGS = 8
"""So many calls are read to reach experts without tokens."""


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts.

    Attributes:
        owner: name of the module that computes it.
        unrolled: a call of that module.
        loop: what it does.
        template: what each expert computes.
        routed: where the routing comes from.
        count: how many experts there are.
    """

    owner: str
    unrolled: Unrolled
    loop: Loop
    template: Template
    routed: RoutedBy
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
        pairs = (mine.chosen, theirs.chosen), (mine.weights, theirs.weights)
        return mine.kind == theirs.kind and all(_name(a) == _name(b) for a, b in pairs)

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
                f"{_family(layer.weight)} {layer.bias and _family(layer.bias)} {layer.transposed}"
                for layer in self.template.layers
            ),
        ]

    @property
    def rest(self) -> list[str]:
        """Return what is computed of the results."""
        made, places, told = {self.loop.result}, dict[fx.Node, str](), list[str]()
        is_behind = False
        for node in self.unrolled.graph.nodes:
            if is_behind and not made.isdisjoint(node.all_input_nodes):
                made.add(node)
                given = fx.map_arg((operands(node), dict(node.kwargs)), lambda used: places.get(used, used.op))
                told.append(f"{node.op} {node.target} {given}")
                places[node] = f"%{len(places)}"
            is_behind = is_behind or node is self.loop.writes[-1]
        return told

    @property
    def is_stacked(self) -> bool:
        """Whether all parameters are stacked already."""
        return all(isinstance(source, Slices) for source in self.sources)


def routings_to(mixture: Mixture, unread: set[int]) -> Iterator[dict[str, Tensor]]:
    """Yield routings that reach experts which have no tokens, while there are any.

    Args:
        mixture: as the example routes its tokens.
        unread: is given the numbers of those experts; whoever runs a routing takes away what it reached.
    """
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


def members_of(mixture: Mixture) -> list[Items]:
    """Return the families of tensors that are not stacked yet."""
    return [source for source in mixture.sources if isinstance(source, Items)]


def _name(node: fx.Node | None) -> str | None:
    return None if node is None else node.name


def _family(source: Source) -> str:
    return f"{source.family} {source.inside}" if isinstance(source, Items) else source.family

"""Which values of a forward say who goes to which expert: those that fit what the loop did with the example."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx

from ...errors import MatchFailure
from ...layers.moe import Routing, over_capacity
from ...operators import reached, upwards
from .capacity import Bound
from .members import operands
from .rounds import Loop, Round

__all__ = ["RoutedBy", "routing_of"]


Order = Literal["tokens", "slots"]
"""Whether earlier tokens come before later ones where experts have a capacity, or all first choices before others."""


@dataclass(frozen=True)
class RoutedBy:
    """Where a loop has its routing from."""

    hidden: fx.Node  # the node of the inputs of all tokens [..., in]
    chosen: fx.Node  # the node of the choices [..., k], or of a mask [..., experts]
    weights: fx.Node | None  # the node of what results are multiplied by, or None
    kind: Routing  # see `FusedExperts`
    spare: int = 0  # how many numbers past that of the last expert stand for none
    capacity: Bound | None = None  # how many tokens each expert takes at most
    orders: tuple[Order, ...] = ("tokens",)  # which of their choices come first, for all that the example shows
    is_turned: bool = False  # whether `chosen`, tokens of each expert, and `weights` are [n, experts]

    def takes_all(self, tokens: int, values: Mapping[fx.Node, Any]) -> bool:
        """Say whether each token has one expert, whatever is chosen."""
        is_one = self.kind in ("chosen", "scores") and values[self.chosen].numel() == tokens
        return is_one and not self.spare and self.capacity is None


def routing_of(loop: Loop, count: int, values: Mapping[fx.Node, Any], capacity: Bound | None = None) -> RoutedBy:
    """Return where the routing of a loop comes from, or raise MatchFailure where no values fit."""
    return _RoutingSearch(loop, count, values, _Pairs(loop.rounds, count), capacity).find()


_KINDS: Mapping[tuple[str, bool], Routing] = {
    ("chosen", False): "chosen", ("chosen", True): "scores", ("mask", False): "shared", ("mask", True): "mask",
}  # fmt: skip
"""Whether there are choices or a mask, and whether the weights are those of all experts -> see `FusedExperts`."""


class _Pairs:
    """Every token and expert that met, and with which weight, in the order of their numbers."""

    def __init__(self, rounds: Sequence[Round], count: int) -> None:
        self.count = count
        tokens = torch.cat([each.tokens for each in rounds])
        experts = torch.cat([each.experts for each in rounds])
        self.is_weighted = rounds[0].weights is not None
        if any((each.weights is not None) is not self.is_weighted for each in rounds):
            raise MatchFailure("the results of some experts are weighted, and those of others are not")
        weights = torch.cat([torch.ones_like(r.tokens) if r.weights is None else r.weights for r in rounds])
        if weights.is_floating_point() and not weights.isfinite().all():
            raise MatchFailure("the routing weights of the example are not all finite")
        self.keys, self.weights = _sorted(tokens, experts, weights, count)
        if len(self.keys) == 0:
            raise MatchFailure("the examples send no token to any expert")

    def are(self, tokens: Tensor, experts: Tensor, weights: Tensor | None) -> bool:
        """Say whether these are the same pairs; the weights, too, where there are any."""
        if len(tokens) != len(self.keys):
            return False
        given = torch.ones_like(tokens) if weights is None else weights
        keys, given = _sorted(tokens, experts, given, self.count)
        return torch.equal(keys, self.keys) and (
            weights is None or torch.equal(given.to(self.weights.dtype), self.weights)
        )


def _sorted(tokens: Tensor, experts: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    keys = tokens.long() * count + experts.long()
    order = weights.argsort(stable=True)
    order = order[keys[order].argsort(stable=True)]
    return keys[order], weights[order]


class _RoutingSearch:
    def __init__(
        self, loop: Loop, count: int, values: Mapping[fx.Node, Any], pairs: _Pairs, capacity: Bound | None
    ) -> None:
        self.loop, self.count, self.values, self.pairs = loop, count, values, pairs
        self.capacity = capacity
        self.limit = values[capacity] if isinstance(capacity, fx.Node) else capacity
        self.tokens = loop.tokens
        self.before = _ancestors(loop)

    def find(self) -> RoutedBy:
        weighted = self.pairs.is_weighted
        for node, kind, tokens, experts in self._choices():
            kept = self._kept(kind, experts)
            orders = tuple[Order, ...](e for e, own in kept.items() if self.pairs.are(tokens[own], experts[own], None))
            if not orders:
                continue
            hidden, own, spare = self._hidden(node), kept[orders[0]], self._spare(node, kind)
            if not weighted:
                return RoutedBy(hidden, node, None, kind, spare, self.capacity, orders)
            for weights, of_all, given in self._weights(kind, tokens, experts):
                if self.pairs.are(tokens[own], experts[own], given[own]):
                    found = _KINDS[kind, of_all]
                    if found == "shared" and self.values[node].shape == (self.tokens, 1, self.count):
                        found = "slots"
                    return RoutedBy(hidden, node, weights, found, spare, self.capacity, orders)
        by_expert = self._by_expert() if self.capacity is None else None
        if by_expert is not None:
            return by_expert
        if len(self.pairs.keys) == self.tokens * self.count:
            raise MatchFailure("every token goes to every expert; fuse_ensembles computes that")
        raise MatchFailure("no tensor in its forward says which experts each token goes to, and with which weight")

    def _kept(self, kind: str, experts: Tensor) -> Mapping[Order, Tensor]:
        """Return which pairs are left by each order in which tokens may come to experts that have a capacity."""
        if self.limit is None:
            return {"tokens": torch.ones_like(experts, dtype=torch.bool)}
        if kind != "chosen":
            return {}
        by_slots = over_capacity(experts.long().t(), self.count, self.limit).t()
        return {"tokens": ~over_capacity(experts.long(), self.count, self.limit), "slots": ~by_slots}

    def _by_expert(self) -> RoutedBy | None:
        """Return the routing where experts choose their tokens [experts, n] or [n, experts]; None where they do not."""
        tables = {node: value for node in self.before if isinstance(value := self.values.get(node), Tensor)}
        for node, value in tables.items():
            if value.ndim != 2 or value.dtype not in (torch.int64, torch.int32):
                continue
            alike = [other for other, own in tables.items() if own.shape == value.shape and own.is_floating_point()]
            for is_turned in (False, True):
                tokens, *given = (each.t() if is_turned else each for each in (value, *(tables[o] for o in alike)))
                experts = torch.arange(len(tokens), device=value.device).unsqueeze(1).expand(tokens.shape)
                fits = partial(self.pairs.are, tokens.flatten(), experts.flatten())
                if len(tokens) != self.count or not fits(None):
                    continue
                weights = (other for other, own in zip(alike, given, strict=True) if fits(own.flatten()))
                found = next(weights, None) if self.pairs.is_weighted else None
                if found is not None or not self.pairs.is_weighted:
                    return RoutedBy(self._hidden(node), node, found, "tokens", is_turned=is_turned)
        return None

    def _hidden(self, chosen: fx.Node) -> fx.Node:
        """Return the node of the inputs of all tokens; what is picked by the choices has other rows with others."""
        rounds, picked = self.loop.rounds, set(reached([chosen], lambda node: node.users))
        for node in upwards(rounds[0].rows):
            if node not in picked and all(self._has_rows(node, each) for each in rounds):
                return node
        raise MatchFailure("its experts' inputs are not rows of one tensor")

    def _has_rows(self, node: fx.Node, each: Round) -> bool:
        value, rows = self.values.get(node), self.values[each.rows]
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[-1] != rows.shape[-1]:
            return False
        if value.shape[:-1].numel() != self.tokens or value.dtype != rows.dtype:
            return False
        return torch.equal(value.reshape(self.tokens, -1)[each.tokens], rows)

    def _candidates(self) -> Iterator[tuple[fx.Node, Tensor]]:
        for node in self.before:
            value = self.values.get(node)
            if not isinstance(value, Tensor) or not value.ndim or not value.numel():
                continue
            if (value.shape if value.ndim == 1 else value.shape[:-1]).numel() == self.tokens:
                yield node, value.reshape(self.tokens, -1)

    def _choices(self) -> Iterator[tuple[fx.Node, Literal["chosen", "mask"], Tensor, Tensor]]:
        numbers = torch.arange(self.tokens)
        for node, value in self._candidates():
            if value.dtype in (torch.int64, torch.int32) and int(value.min()) >= 0 and int(value.max()) < self.count:
                yield node, "chosen", numbers.to(value.device).unsqueeze(1).expand(value.shape), value
        for node, value in self._candidates():
            if value.shape[1] == self.count and not value.is_floating_point():
                tokens, experts = value.nonzero(as_tuple=True)
                yield node, "mask", tokens, experts

    def _weights(self, kind: str, tokens: Tensor, experts: Tensor) -> Iterator[tuple[fx.Node, bool, Tensor]]:
        """Yield nodes that may have the weights, whether they have those of all experts, and those of the pairs."""
        floats = [(node, value) for node, value in self._candidates() if value.is_floating_point()]
        for node, value in floats:
            if kind == "chosen" and value.shape == tokens.shape:
                yield node, False, value
        for node, value in floats:
            if value.shape[1] == self.count:
                yield node, True, value[tokens, experts]
            elif kind == "mask" and value.shape[1] == 1:
                yield node, False, value[tokens, 0]

    def _spare(self, node: fx.Node, kind: str) -> int:
        """Return how many more numbers the loop knows than there are experts: those stand for none."""
        if kind != "chosen":
            return 0
        sizes = [user.kwargs.get("num_classes", operands(user)[1:2]) for user in node.users if "one_hot" in user.name]
        return max([size - self.count for size in sizes if type(size) is int], default=0)


def _ancestors(loop: Loop) -> list[fx.Node]:
    """Return, in order, what the loop's tokens and weights come from."""
    graph = loop.target.graph
    starts = [used for write in loop.writes for used in write.all_input_nodes if used is not loop.target]
    starts += [each.weighting for each in loop.rounds if each.weighting is not None]
    # Lists of each expert's tokens may be made of it in Python.
    starts += [used for node in graph.find_nodes(op="call_method", target="tolist") for used in node.all_input_nodes]

    def untainted(nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [node for node in nodes if node not in loop.tainted]

    found = set(reached(untainted(starts), lambda node: untainted(node.all_input_nodes)))
    return [node for node in graph.nodes if node in found]

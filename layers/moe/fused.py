"""Experts that were a loop in a user's module, computed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...runtime.graphs import PortableGraph
from ..vectorized import graph_of_member
from .dealt import ExpertPlacement, dealt_mixture
from .dispatch import may_look, mixture
from .lowerings import Linear, Lowering, Projection, Task, combine, outputs_in_blocks
from .router import over_capacity

__all__ = ["FusedExperts", "Routing", "added_to", "apply_linear"]

Routing = Literal["chosen", "scores", "mask", "shared", "slots", "tokens"]


def apply_linear(linears: Sequence[Linear], number: int, rows: Tensor) -> Tensor:
    """Apply one of an expert's linear layers."""
    return linears[number](rows)


def added_to(target: Tensor, found: Tensor) -> Tensor:
    """Return what a loop made of the tensor that it added its results to."""
    return target + found.reshape(target.shape).to(target.dtype)


def _rows(routing: Tensor) -> Tensor:
    """Return what is known of tokens with one row for each."""
    return routing.reshape(-1, routing.shape[-1]) if routing.ndim > 1 else routing.unsqueeze(1)


class FusedExperts(nn.Module):
    """Apply experts to the tokens that chose them; it holds no tensors.

    `linears`: are weights of each layer [experts, in, out], and is there a bias. Choices, by `routing`: `chosen`,
    weights [tokens, k]; `scores`, weighed by [tokens, experts]; `mask`, both [tokens, experts]; `shared`, a mask and
    weights [tokens, 1]; `slots`, [tokens, slots, experts] and [tokens, slots]; `tokens`, the tokens of each expert and
    their weights [experts, n]. Numbers up to `spare` past the last expert are none. Where experts have a capacity, all
    first choices come before all second ones if `slots_first`, else earlier tokens before later ones. Results have the
    inputs' dtype if it `adds_to_inputs`. `lowering` holds for half to twice as many `tokens`, or all.
    """

    _fxopt_is_operation: ClassVar[bool] = True

    def __init__(
        self, compute: fx.GraphModule, linears: Sequence[tuple[bool, bool]], *, routing: Routing = "chosen",
        scale: float = 1.0, lowering: Lowering | None = None, spare: int = 0, adds_to_inputs: bool = False,
        tokens: int | None = None, slots_first: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.compute = compute
        self.linears, self.routing, self.scale = tuple(linears), routing, scale
        self.lowering: Lowering | None = lowering
        self.spare, self.adds_to_inputs, self.tokens = spare, adds_to_inputs, tokens
        self.slots_first = slots_first
        self.placement: ExpertPlacement | None = None  # where it is given the tensors of some experts only

    def forward(
        self, hidden: Tensor, chosen: Tensor, weights: Tensor | None, *tensors: Tensor, capacity: int | None = None
    ) -> Tensor:
        """Return the weighted sum of the experts' outputs [..., out] for inputs [..., in].
        `tensors` are weight and bias of each linear layer, stacked; weights of None weigh all alike. Choices of an
        expert beyond its first `capacity` are left out.
        """
        projections = list(self._projections(tensors))
        x = hidden.reshape(-1, hidden.shape[-1])
        weights = weights if weights is None or self.routing == "tokens" else _rows(weights)
        if self.routing == "tokens":
            found = self._by_expert(x, chosen.long(), weights, projections)
        elif self.routing in ("chosen", "scores"):
            found = self._by_choice(x, chosen, weights, projections, capacity)
        else:
            found = self._by_mask(x, chosen, weights, projections)
        found = found if self.scale == 1.0 else found * self.scale
        return found.reshape(*hidden.shape[:-1], found.shape[-1])

    def _projections(self, tensors: Sequence[Tensor]) -> Iterator[Projection]:
        left = iter(tensors)
        for transposed, has_bias in self.linears:
            weight = next(left)
            yield Projection(weight, next(left) if has_bias else None, transposed)

    def _by_choice(
        self, x: Tensor, chosen: Tensor, weights: Tensor | None, projections: list[Projection], capacity: int | None
    ) -> Tensor:
        chosen, valid = _rows(chosen).long(), None
        if self.spare:
            experts = self._experts(projections)
            valid = (chosen >= 0) & (chosen < experts)
            chosen = chosen.clamp(0, experts - 1)
        weights = self._weights(x, chosen, weights)
        if capacity is not None:
            valid = self._within(chosen, self._experts(projections), capacity)
            if may_look(x):
                tokens, slots = valid.nonzero(as_tuple=True)
                return self._added(x, tokens, chosen[tokens, slots], weights[tokens, slots], projections)
        weights = weights if valid is None else weights * valid
        tokens, routed = x.shape[0], chosen.shape[0]  # `len` makes a number of what is symbolic
        found = self._mixture(x[:routed], chosen, weights, projections, tokens)
        return found if routed >= tokens else F.pad(found, (0, 0, 0, tokens - routed))

    def _within(self, chosen: Tensor, experts: int, capacity: int) -> Tensor:
        """Say which choices [tokens, k] their expert has room for."""
        if self.slots_first:
            return ~over_capacity(chosen.t(), experts, capacity).t()
        return ~over_capacity(chosen, experts, capacity)

    def _by_expert(self, x: Tensor, chosen: Tensor, weights: Tensor | None, projections: list[Projection]) -> Tensor:
        experts = torch.arange(chosen.shape[0], device=x.device).unsqueeze(1).expand(chosen.shape)
        own = x.new_ones(chosen.numel()) if weights is None else weights.reshape(-1)
        return self._added(x, chosen.reshape(-1), experts.reshape(-1), own, projections)

    def _added(
        self, x: Tensor, tokens: Tensor, experts: Tensor, weights: Tensor, projections: list[Projection]
    ) -> Tensor:
        """Return the sum for all tokens of pairs of a token and an expert, each with its weight."""
        found = self._mixture(x[tokens], experts.unsqueeze(1), weights.unsqueeze(1), projections, len(x))
        empty = found.new_zeros(len(x), found.shape[-1])
        has_none = not tokens.shape[0] and self.routing != "tokens"  # a loop without rounds gives plain zeros
        return empty if has_none else empty.index_add(0, tokens, found)

    def _weights(self, x: Tensor, chosen: Tensor, weights: Tensor | None) -> Tensor:
        if weights is None:
            return x.new_ones(chosen.shape)
        return weights.gather(1, chosen) if self.routing == "scores" else weights

    def _by_mask(self, x: Tensor, mask: Tensor, weights: Tensor | None, projections: list[Projection]) -> Tensor:
        mask = mask if self.routing == "slots" else _rows(mask).unsqueeze(1)
        # Loops leave out experts that nobody chose, by the sum of the mask: of counts that are none it may be zero.
        mask = mask * (mask.sum((0, 1)) > 0)
        if self.placement is None and not may_look(x):
            return self._by_all(x, mask != 0, weights, projections)
        tokens, slots, chosen = mask.nonzero(as_tuple=True)
        if weights is None:
            own = x.new_ones(len(tokens))
        else:
            own = weights[tokens, chosen if self.routing == "mask" else slots]
        return self._added(x, tokens, chosen, own, projections)

    def _by_all(self, x: Tensor, mask: Tensor, weights: Tensor | None, projections: list[Projection]) -> Tensor:
        """Apply every expert to every token: how many of them a mask names depends on the data."""
        own = x.new_ones(()) if weights is None else weights.unsqueeze(1 if self.routing == "mask" else -1)
        scores = torch.where(mask, own, 0).sum(1)
        everyone = torch.arange(mask.shape[-1], device=x.device).expand(x.shape[0], -1)
        outputs = outputs_in_blocks(Task(x, everyone, projections, self.compute))
        return combine(outputs.masked_fill(~mask.any(1).unsqueeze(-1), 0), scores, self._dtype(x))

    def _mixture(
        self, x: Tensor, chosen: Tensor, weights: Tensor, projections: list[Projection], tokens: int
    ) -> Tensor:
        if self.placement is not None:
            return dealt_mixture(self.placement, x, chosen, weights, projections, self.compute, self._dtype(x))
        lowering = self.lowering
        if self.tokens is not None and not (may_look(x) and self.tokens <= 2 * tokens <= 4 * self.tokens):
            lowering = None
        return mixture(x, chosen, weights, projections, self.compute, lowering, self._dtype(x))

    def _experts(self, projections: list[Projection]) -> int:
        return len(projections[0].weight) if self.placement is None else self.placement.experts

    def _dtype(self, x: Tensor) -> torch.dtype | None:
        return x.dtype if self.adds_to_inputs else None

    def __getstate__(self) -> dict[str, Any]:
        """Keep the graph node by node: pickle would trace its code again."""
        state = dict(self.__dict__)
        state["_modules"] = {name: child for name, child in self._modules.items() if name != "compute"}
        state["_compute"] = dict(self.compute.named_children()), PortableGraph(self.compute.graph)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        children, graph = state.pop("_compute")
        super().__setstate__(state)
        self.compute = graph_of_member(children, graph.graph()).train(self.training)

    def extra_repr(self) -> str:
        return f"{len(self.linears)} linears, routing={self.routing!r}, lowering={self.lowering!r}"

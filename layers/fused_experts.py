"""Experts that were a loop in a user's module, computed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, fx, nn

from .moe import Linear, Projection, Task, Way, mixture, possible_ways

__all__ = ["FusedExperts", "added_to", "apply_linear"]

Routing = Literal["chosen", "scores", "mask"]


def apply_linear(linears: Sequence[Linear], number: int, rows: Tensor) -> Tensor:
    """Apply one of an expert's linear layers."""
    return linears[number](rows)


def added_to(target: Tensor, found: Tensor) -> Tensor:
    """Return what a loop made of the tensor that it added its results to."""
    return target + found.reshape(target.shape).to(target.dtype)


class FusedExperts(nn.Module):
    """Apply experts to the tokens that chose them; it holds no tensors.

    Args:
        compute: what an expert computes, of its rows and its linear layers.
        linears: for each of them whether its weights are [experts, in, out], and whether there is a bias.
        routing: `chosen`: choices and weights are [tokens, k]; `scores`: the weights [tokens, experts] hold those of all
            experts; `mask`: the choices are a mask [tokens, experts], the weights likewise or [tokens, 1].
        scale: what results are multiplied by besides.
        way: how experts are applied; None decides at each call.
        spare: how many numbers past that of the last expert stand for none.
    """

    def __init__(
        self, compute: fx.GraphModule, linears: Sequence[tuple[bool, bool]], *, routing: Routing = "chosen",
        scale: float = 1.0, way: Way | None = None, spare: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.compute = compute
        self.linears, self.routing, self.scale, self.way, self.spare = tuple(linears), routing, scale, way, spare

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor | None, *tensors: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs [..., out].

        Args:
            hidden: inputs of tokens [..., in].
            chosen: see `routing`.
            weights: see `routing`; None weighs all alike.
            tensors: weight and bias of each linear layer, stacked.
        """
        projections = list(self._projections(tensors))
        x = hidden.reshape(-1, hidden.shape[-1])
        if self.routing == "mask":
            found = self._by_mask(x, chosen.reshape(len(x), -1), weights, projections)
        else:
            found = self._by_choice(x, chosen.reshape(len(x), -1), weights, projections)
        found = found if self.scale == 1.0 else found * self.scale
        return found.reshape(*hidden.shape[:-1], found.shape[-1])

    def _projections(self, tensors: Sequence[Tensor]) -> Iterator[Projection]:
        left = iter(tensors)
        for transposed, has_bias in self.linears:
            weight = next(left)
            yield Projection(weight, next(left) if has_bias else None, transposed)

    def _by_choice(self, x: Tensor, chosen: Tensor, weights: Tensor | None, projections: list[Projection]) -> Tensor:
        experts, chosen = len(projections[0].weight), chosen.long()
        valid = None if not self.spare else chosen < experts
        if valid is not None:
            chosen = chosen.clamp(max=experts - 1)
        weights = self._weights(x, chosen, weights)
        return self._mixture(x, chosen, weights if valid is None else weights * valid, projections)

    def _weights(self, x: Tensor, chosen: Tensor, weights: Tensor | None) -> Tensor:
        if weights is None:
            return x.new_ones(chosen.shape)
        weights = weights.reshape(len(x), -1)
        return weights.gather(1, chosen) if self.routing == "scores" else weights

    def _by_mask(self, x: Tensor, mask: Tensor, weights: Tensor | None, projections: list[Projection]) -> Tensor:
        tokens, chosen = mask.nonzero(as_tuple=True)
        weights = x.new_ones(mask.shape) if weights is None else weights.reshape(len(x), -1).expand(mask.shape)
        found = self._mixture(x[tokens], chosen.unsqueeze(1), weights[tokens, chosen].unsqueeze(1), projections)
        return found.new_zeros(len(x), found.shape[-1]).index_add(0, tokens, found)

    def _mixture(self, x: Tensor, chosen: Tensor, weights: Tensor, projections: list[Projection]) -> Tensor:
        way = self.way
        if way is not None and way not in possible_ways(Task(x, chosen, projections, self.compute)):
            way = None
        return mixture(x, chosen, weights, projections, self.compute, way)

    def extra_repr(self) -> str:
        return f"{len(self.linears)} linears, routing={self.routing!r}, way={self.way!r}"

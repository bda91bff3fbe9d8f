"""Coarsening by triads whose scores a graph network computes, as `SAGPooling` has them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .triad_pooling import RO3TriadPooling

__all__ = ["SAGTriadPooling"]


class SAGTriadPooling(RO3TriadPooling):
    """Pool triads by the output of a graph network with one channel, in the place of the features.

    Args:
        gnn: called with features and edges; gives a number for each node.
        options: of `RO3TriadPooling`.

    Shape:
        - as of `RO3TriadPooling`
    """

    def __init__(self, gnn: nn.Module, **options: Any) -> None:
        super().__init__(1, **options)
        self.gnn = gnn
        for name in ("select", "reduce", "connect"):  # state dicts list the scorer first, as `SAGPooling` does
            self.add_module(name, self._modules.pop(name))

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        attn: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """Return what `RO3TriadPooling` does, scored by the network's numbers [nodes, 1] of attn, or else of x."""
        attn = x if attn is None else attn
        attn = self.gnn(attn.view(-1, 1) if attn.dim() == 1 else attn, edge_index)
        return super().forward(x, edge_index, edge_attr, batch, attn)

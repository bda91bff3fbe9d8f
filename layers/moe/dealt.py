"""Experts of which each process has some: tokens go to the processes that have their experts, and results come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ...compat.distributed import added_up, exchanged, handed_to_all
from .dispatch import mixture
from .lowerings import Compute, Projection

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ExpertPlacement", "dealt_mixture"]


@dataclass(frozen=True)
class ExpertPlacement:
    """To which processes `experts` are dealt, in order and each as many.
    `senders` have rows of their own, which they send to each other; `sharers` have the same rows, and add up what their
    experts give. With both, each sender's experts are dealt to its sharers.
    """

    experts: int
    senders: DeviceMesh | None = None
    sharers: DeviceMesh | None = None

    def places(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return, for experts by number, which sender has each, and where in its part; -1 is with another sharer."""
        shares = 1 if self.sharers is None else self.sharers.size()
        size = self.experts // shares // (1 if self.senders is None else self.senders.size())
        block, place = indices // size, indices % size
        if self.sharers is not None:
            place = place.masked_fill(block % shares != self.sharers.get_local_rank(), -1)
        return block // shares, place


def dealt_mixture(
    placement: ExpertPlacement,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    projections: Sequence[Projection],
    compute: Compute,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return what `mixture` does, of experts that are dealt; `projections` has this process's part.

    Takes tokens `x` [n, C], and the numbers and weights [n, k] of the experts of each. All processes call it, those
    without tokens, too. Expert parallelism as in Lepikhin et al. 2021, "GShard", section 3, without capacities; but a
    token is sent once to each process that has experts of it, not once to each expert.
    """
    if placement.sharers is not None:
        x, weights = handed_to_all(x, placement.sharers), handed_to_all(weights, placement.sharers)
    owners, places = placement.places(indices)
    if placement.senders is None:
        total = _sum_of_own(x, places, weights, projections, compute, dtype)
    else:
        total = _sent(placement.senders, owners, x, places, weights, projections, compute, dtype)
    return total if placement.sharers is None else added_up(total, placement.sharers)


def _sent(
    mesh: DeviceMesh, owners: Tensor, x: Tensor, places: Tensor, weights: Tensor, projections: Sequence[Projection],
    compute: Compute, dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """Let each process sum up what its experts give, for the tokens of all."""
    goes = (places >= 0).long()
    goes = goes.new_zeros(x.shape[0], mesh.size()).scatter_add_(1, owners, goes) > 0
    to, tokens = goes.t().nonzero(as_tuple=True)
    counts = goes.sum(0)
    sent, received = (cast("list[int]", each.tolist()) for each in (counts, exchanged(counts, mesh)))
    theirs = places[tokens].masked_fill(owners[tokens] != to.unsqueeze(1), -1)
    # Numbers of experts and their weights are one message: small numbers are exact in float32.
    exact = torch.promote_types(weights.dtype, torch.float32)
    counted = torch.cat((weights[tokens].to(exact), theirs.to(exact)), 1)
    rows, counted = (exchanged(each, mesh, sent, received) for each in (x.index_select(0, tokens), counted))
    own, numbers = counted.chunk(2, 1)
    found = _sum_of_own(rows, numbers.long(), own.to(weights.dtype), projections, compute, dtype)
    return _added(x.shape[0], tokens, exchanged(found, mesh, received, sent))


def _sum_of_own(
    x: Tensor, places: Tensor, weights: Tensor, projections: Sequence[Projection], compute: Compute,
    dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """Return the weighted sum of what this process's experts give, by `places` [tokens, k]; -1 is none."""
    chosen = (places.reshape(-1) >= 0).nonzero().squeeze(1)
    tokens = chosen // places.shape[1]
    own, counted = (each.reshape(-1).index_select(0, chosen).unsqueeze(1) for each in (places, weights))
    found = mixture(x.index_select(0, tokens), own, counted, projections, compute, None, dtype)
    return _added(x.shape[0], tokens, found)


def _added(rows: int, places: Tensor, found: Tensor) -> Tensor:
    """Return `rows` sums of what was found for each, in float32 at least until it is rounded."""
    exact = torch.promote_types(found.dtype, torch.float32)
    total = found.new_zeros(rows, found.shape[-1], dtype=exact)
    return total.index_add(0, places, found.to(exact)).to(found.dtype)

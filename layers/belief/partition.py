"""Annealed importance sampling: how large the normalizing constant of a machine is."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .units import VisibleUnits, drawn

__all__ = ["LogPartition", "annealed"]


class LogPartition(NamedTuple):
    """The logarithm of a machine's normalizing constant Z, as it was estimated.

    Attributes:
        estimate: log Z.
        low, high: the logarithms of Z less, and more, three standard errors; -inf where that is nothing.
    """

    estimate: float
    low: float
    high: float


def annealed(
    parameters: tuple[Tensor, Tensor, Tensor],
    units: VisibleUnits,
    base: Tensor,
    steps: int,
    chains: int,
    generator: torch.Generator | None,
) -> LogPartition:
    """Estimate log Z of weight, visible and hidden bias by chains from visible units alone, with the bias `base`.
    At inverse temperature t the energy of visible units is (1 - t) of theirs and t of the machine's, and hidden units
    get t of their input: at 0 there are 2^hidden states of them, all alike.
    """
    weight, bias, hidden_bias = parameters
    v = units.sample(base.expand(chains, -1), generator)
    total = torch.zeros(chains, dtype=torch.float64, device=v.device)
    for low, high in itertools.pairwise(step / steps for step in range(steps + 1)):
        logits = F.linear(v, weight, hidden_bias)
        change = (high - low) * (units.energy(v, base) - units.energy(v, bias))
        total += change + (F.softplus(high * logits) - F.softplus(low * logits)).sum(-1)
        h = drawn(high * logits, generator)
        v = units.sample(torch.lerp(base, bias, high) + high * (h @ weight), generator)
    start = float(units.log_partition(base.double())) + len(hidden_bias) * math.log(2)
    return _summary(total, start)


def _summary(total: Tensor, start: float) -> LogPartition:
    """Return the mean of exp(total), times exp(start), and what three standard errors are around it."""
    largest = float(total.max())
    shares = (total - largest).exp()
    mean, error = float(shares.mean()), 3 * float(shares.std(correction=min(1, len(shares) - 1))) / len(shares) ** 0.5
    found = (start + largest + math.log(each) if each > 0 else -math.inf for each in (mean, mean - error, mean + error))
    return LogPartition(*found)

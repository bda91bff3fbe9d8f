"""What differs between the kinds of visible units: their means, draws and energy, and the values that they take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["KINDS", "Softmax", "VisibleUnits", "drawn"]


def drawn(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return draws of binary units, compared in float32 at least: narrow numbers are 0 far too often."""
    probability = torch.sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    uniform = torch.empty_like(probability).uniform_(generator=generator)
    return (uniform < probability).to(logits.dtype)


class VisibleUnits(Protocol):
    """One kind of visible units; `total` is their total input, from the hidden ones and their own bias."""

    def mean(self, total: Tensor) -> Tensor:
        """Return the expectations, [..., visible]."""
        ...

    def sample(self, total: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return a draw, [..., visible]."""
        ...

    def energy(self, v: Tensor, bias: Tensor) -> Tensor:
        """Return the energy of the visible units alone, [...]."""
        ...

    def noise_(self, noise: Tensor, generator: torch.Generator | None) -> Tensor:
        """Fill a tensor with the noise that `draw_` takes."""
        ...

    def draw_(self, total: Tensor, noise: Tensor) -> None:
        """Put a draw in the place of the total input; the last unit is always on: it stands for the bias."""
        ...

    def refused(self, v: Tensor, low: float, high: float) -> str | None:
        """Say what is wrong with values, which are between these two, if anything is."""
        ...

    def log_partition(self, bias: Tensor) -> Tensor:
        """Return the log of the sum, or integral, of exp(-energy) over all visible units."""
        ...

    def bias_of(self, means: Tensor, rows: int) -> Tensor:
        """Return the bias with which visible units alone have about the means of so many rows."""
        ...


class _Bernoulli:
    """Binary units; what lies between 0 and 1 counts as a probability."""

    def mean(self, total: Tensor) -> Tensor:
        return torch.sigmoid(total)

    def sample(self, total: Tensor, generator: torch.Generator | None) -> Tensor:
        return drawn(total, generator)

    def energy(self, v: Tensor, bias: Tensor) -> Tensor:
        return -(v @ bias)

    def noise_(self, noise: Tensor, generator: torch.Generator | None) -> Tensor:
        return noise.uniform_(generator=generator).logit_()  # logistic: one comparison for each step, no sigmoid

    def draw_(self, total: Tensor, noise: Tensor) -> None:
        torch.lt(noise, total, out=total)

    def log_partition(self, bias: Tensor) -> Tensor:
        return F.softplus(bias).sum()

    def bias_of(self, means: Tensor, rows: int) -> Tensor:
        return ((means * rows + 1) / (rows + 2)).logit()

    def refused(self, v: Tensor, low: float, high: float) -> str | None:
        if low >= 0 and high <= 1:
            return None
        return (
            f"values between {low:g} and {high:g} for binary visible units; "
            "scale them to [0, 1], or make the RBM with kind='gaussian'"
        )


class _Gaussian:
    """Real units with a variance of one around their means."""

    def mean(self, total: Tensor) -> Tensor:
        return total

    def sample(self, total: Tensor, generator: torch.Generator | None) -> Tensor:
        return total + torch.empty_like(total).normal_(generator=generator)

    def energy(self, v: Tensor, bias: Tensor) -> Tensor:
        return (v - bias).square().sum(-1) / 2

    def noise_(self, noise: Tensor, generator: torch.Generator | None) -> Tensor:
        return noise.normal_(generator=generator)

    def draw_(self, total: Tensor, noise: Tensor) -> None:
        total.add_(noise)
        total[:, -1] = 1

    def log_partition(self, bias: Tensor) -> Tensor:
        return bias.new_tensor(len(bias) / 2 * math.log(2 * math.pi))

    def bias_of(self, means: Tensor, rows: int) -> Tensor:
        return means

    def refused(self, v: Tensor, low: float, high: float) -> str | None:
        return None


@dataclass(frozen=True)
class Softmax:
    """Units in groups of so many classes, of which one is on."""

    classes: int

    def mean(self, total: Tensor) -> Tensor:
        return self._grouped(total).softmax(-1).flatten(-2)

    def sample(self, total: Tensor, generator: torch.Generator | None) -> Tensor:
        wide = total.to(torch.promote_types(total.dtype, torch.float32))
        noise = self.noise_(torch.empty_like(wide), generator)
        return self._largest(wide + noise).to(total.dtype)

    def energy(self, v: Tensor, bias: Tensor) -> Tensor:
        return -(v @ bias)

    def noise_(self, noise: Tensor, generator: torch.Generator | None) -> Tensor:
        return noise.exponential_(generator=generator).log_().neg_()  # the largest sum is a draw (Gumbel)

    def draw_(self, total: Tensor, noise: Tensor) -> None:
        total[:, :-1] = self._largest((total + noise)[:, :-1])
        total[:, -1] = 1

    def refused(self, v: Tensor, low: float, high: float) -> str | None:
        sums = self._grouped(v).sum(-1)
        if low >= 0 and float((sums - 1).abs().max()) <= _NEAR:
            return None
        return f"a group of {self.classes} softmax units that is no distribution; give each group one 1, and zeros"

    def log_partition(self, bias: Tensor) -> Tensor:
        return self._grouped(bias).logsumexp(-1).sum()

    def bias_of(self, means: Tensor, rows: int) -> Tensor:
        return ((means * rows + 1) / (rows + self.classes)).log()

    def _grouped(self, units: Tensor) -> Tensor:
        return units.reshape(*units.shape[:-1], -1, self.classes)

    def _largest(self, total: Tensor) -> Tensor:
        grouped = self._grouped(total)
        return torch.zeros_like(grouped).scatter_(-1, grouped.argmax(-1, keepdim=True), 1).flatten(-2)


_NEAR = 1e-2
"""Probabilities of a group may sum to one but for so much: bfloat16 has two digits."""

KINDS: Mapping[str, VisibleUnits] = {"bernoulli": _Bernoulli(), "gaussian": _Gaussian()}
"""The visible units of each kind that takes no number of classes."""

"""What differs between the kinds of visible units: their means, draws and energy, and the values that they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from .sampling import bernoulli_sigmoid, logistic_

__all__ = ["KINDS", "VisibleUnits"]


class VisibleUnits(Protocol):
    """One kind of visible units; `drive` is what they get from the hidden ones and their own bias."""

    def mean(self, drive: Tensor) -> Tensor:
        """Return the expectations, [..., visible]."""
        ...

    def sample(self, drive: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return a draw, [..., visible]."""
        ...

    def energy(self, v: Tensor, bias: Tensor) -> Tensor:
        """Return the energy of the visible units alone, [...]."""
        ...

    def noise_(self, noise: Tensor, generator: torch.Generator | None) -> Tensor:
        """Fill a tensor with the noise that `draw_` takes."""
        ...

    def draw_(self, drive: Tensor, noise: Tensor) -> None:
        """Put a draw in the place of the drive; the last unit is always on: it stands for the bias."""
        ...

    def refused(self, low: float, high: float) -> str | None:
        """Say what is wrong with values between these two, if anything is."""
        ...


class _Bernoulli:
    """Binary units; what lies between 0 and 1 counts as a probability."""

    def mean(self, drive: Tensor) -> Tensor:
        return torch.sigmoid(drive)

    def sample(self, drive: Tensor, generator: torch.Generator | None) -> Tensor:
        return bernoulli_sigmoid(drive, generator)[1]

    def energy(self, v: Tensor, bias: Tensor) -> Tensor:
        return -(v @ bias)

    def noise_(self, noise: Tensor, generator: torch.Generator | None) -> Tensor:
        return logistic_(noise, generator)

    def draw_(self, drive: Tensor, noise: Tensor) -> None:
        torch.lt(noise, drive, out=drive)

    def refused(self, low: float, high: float) -> str | None:
        if low >= 0 and high <= 1:
            return None
        return (
            f"values between {low:g} and {high:g} for binary visible units; "
            "scale them to [0, 1], or make the RBM with kind='gaussian'"
        )


class _Gaussian:
    """Real units with a variance of one around their means."""

    def mean(self, drive: Tensor) -> Tensor:
        return drive

    def sample(self, drive: Tensor, generator: torch.Generator | None) -> Tensor:
        return drive + torch.empty_like(drive).normal_(generator=generator)

    def energy(self, v: Tensor, bias: Tensor) -> Tensor:
        return (v - bias).square().sum(-1) / 2

    def noise_(self, noise: Tensor, generator: torch.Generator | None) -> Tensor:
        return noise.normal_(generator=generator)

    def draw_(self, drive: Tensor, noise: Tensor) -> None:
        drive.add_(noise)
        drive[:, -1] = 1

    def refused(self, low: float, high: float) -> str | None:
        return None


KINDS: Mapping[str, VisibleUnits] = {"bernoulli": _Bernoulli(), "gaussian": _Gaussian()}
"""The visible units of each kind."""
